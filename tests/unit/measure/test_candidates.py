from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.errors import UserError
from draftsmith.measure.candidates import Alike, Drafted, alike, by_reply, read_drafted, reference_chains
from draftsmith.measure.decode import DraftProposer, Verifier
from draftsmith.target.loading import load_model
from draftsmith.target.reply import Sampling
from tiny_target import save_tiny_target
from toy_export import toy_config

LOG = """\
0.01.717.453 D slot get_n_draft_: id  0 | task 0 | max possible draft: 58
0.01.719.054 D spec        draft:  - seq_id 0, draft candidate   0, pos   0:  14670 (   0.229) ' seats'
0.01.719.073 D spec        draft:  - seq_id 0, draft candidate   1, pos   0:   3499 (   0.143) ' costs'
0.01.719.074 D spec        draft:  - seq_id 0, draft candidate   2, pos   0:  26064 (   0.101) ' sells'
0.01.720.366 D spec        draft:  - seq_id 0, draft candidate   0, pos   1:    553 (   0.295) ' has'
0.01.720.381 D spec        draft:  - seq_id 0, draft candidate   1, pos   1:    216 (   0.120) ' '
0.01.722.642 D spec common_specu: called impl draft-eagle3, hist size = 245, call_count = 1, gen = 2
0.01.722.700 D slot handle_last_: id  0 | task 0 | generate_draft: id=66, #tokens=245, #draft=2, pos_next=245
0.01.784.797 D spec        draft:  - seq_id 0, draft candidate   0, pos   0:  34680 (   0.435) ' buys'
0.01.784.797 D spec        draft:  - seq_id 0, draft candidate   0, pos   1:     33 (   0.435) '1'
0.01.788.022 D slot handle_last_: id  0 | task 7 | generate_draft: id=5889, #tokens=246, #draft=1, pos_next=246
"""
GREEDY = Sampling(max_tokens=3, temperature=0)


def test_the_log_gives_the_candidates_of_every_drafting() -> None:
    assert read_drafted(LOG.splitlines()) == [
        Drafted(task=0, known=245, last=66, chain=((14670, 3499, 26064), (553, 216))),
        Drafted(task=7, known=246, last=5889, chain=((34680,),)),  # drafted two, kept one
    ]


def test_a_server_of_several_slots_cannot_be_told_apart() -> None:
    with pytest.raises(UserError, match="expected a server with one slot"):
        read_drafted([LOG.splitlines()[1].replace("seq_id 0", "seq_id 1")])


def test_a_reply_too_short_to_draft_in_does_not_get_another_ones_drafts() -> None:
    first, second = Drafted(0, 10, 3, ((1, 2, 3),)), Drafted(44, 12, 4, ((4, 5, 6),))
    silent = Drafted(46, 13, 5, ())
    replies = [{"timings": {"draft_n": 4}}, {"timings": {}}, {"timings": {"draft_n": 1}}]
    assert by_reply([first, second, silent], replies) == [[first], [], [second]]


def test_chains_are_compared_up_to_the_first_that_differs() -> None:
    ours = ((1, 2, 3), (4, 5, 6), (7, 8, 9))
    assert alike(ours, ours) == Alike(3, 3, 3, 3)
    assert alike(((1, 3, 2), (4, 5, 6), (0, 8, 9)), ours) == Alike(3, 2, 3, 1)
    assert alike(((0, 2, 3), (4, 5, 6), (7, 8, 9)), ours) == Alike(1, 0, 1, 0)
    assert alike(((1,), (4,), (7,)), ours).share == 1.0  # a list may be shorter than ours
    assert Alike().share == 0.0


def test_our_chains_are_those_of_the_reference_decoder(tmp_path: Path) -> None:
    model = load_model(str(save_tiny_target(tmp_path)), torch.float32, torch.device("cpu"))
    config = toy_config(target_vocab_size=model.config.vocab_size, rms_norm_eps=model.config.rms_norm_eps)
    torch.manual_seed(3)
    draft = Eagle3Draft(config).eval()
    ids = torch.arange(config.draft_vocab_size) * 2
    t2d = torch.zeros(config.target_vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    draft.set_vocab(ids - torch.arange(len(ids)), t2d)
    verifier = Verifier(model, config.aux_layers)
    tokens = torch.randint(0, config.target_vocab_size, (20,)).tolist()
    drafted = [Drafted(0, known, tokens[known], ((0,),) * 3) for known in (8, 9, 12, 18)]
    chains = reference_chains(verifier, draft, tokens, drafted)
    proposer, done = DraftProposer(draft), 0
    with torch.inference_mode():
        verifier.begin()
        _, aux = verifier.forward(tokens, 1)
        assert aux is not None
        for one, chain in zip(drafted, chains, strict=True):
            rows = aux[done : one.known]
            proposal = proposer.propose(tokens[done + 1 : one.known + 1], rows, 3, GREEDY, torch.Generator())
            assert [best[0] for best in chain] == proposal.ids
            assert all(len(set(best)) == 3 for best in chain)
            done = one.known
    verifier.close()
