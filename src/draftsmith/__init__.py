"""draftsmith: turn a served reasoning model into a faster one, and measure honestly whether it pays off."""

__version__ = "0.1.0"
