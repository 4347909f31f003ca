"""vLLM's connector for hidden states without CUDA streams and pinned memory; vLLM loads it, in its own environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class CpuHiddenStates(ExampleHiddenStatesConnector):
    """Gathers and writes at once."""

    def _submit_async_write(self, pending: Any) -> None:
        size = self._block_size
        slots = (torch.tensor(pending.block_ids)[:, None] * size + torch.arange(size)[None]).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).contiguous()
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        save_file({"hidden_states": states, "token_ids": pending.token_ids.clone()}, pending.filename)
        os.close(self._lock_fds.pop(pending.req_id))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self.has_connector_metadata():
            for pending in self._get_connector_metadata().pending_saves:
                self._submit_async_write(pending)
        return finished_req_ids or None, None
