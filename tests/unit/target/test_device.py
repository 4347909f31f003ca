from __future__ import annotations

import pytest
import torch

from draftsmith.errors import UserError
from draftsmith.target.device import compute_dtype, pick_device

CPU = torch.device("cpu")


@pytest.mark.parametrize(("there", "expected"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_cuda_where_there_is_one(there: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert pick_device("auto").type == expected


@pytest.mark.parametrize("name", ["gpu", "cuda:99"])
def test_a_device_that_is_not_here_is_named_in_one_line(name: str) -> None:
    with pytest.raises(UserError, match=f"device {name}: expected auto, cpu, cuda") as raised:
        pick_device(name)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("bf16", "amx", "expected"),
    [(False, False, torch.float32), (True, False, torch.bfloat16), (False, True, torch.bfloat16)],
)
def test_auto_is_bfloat16_only_where_a_cpu_computes_in_it(
    bf16: bool, amx: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert compute_dtype("auto", CPU) == expected


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), torch.float32), ((9, 0), torch.bfloat16)])
def test_auto_is_bfloat16_only_on_gpus_that_do_not_emulate_it(
    capability: tuple[int, int], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert compute_dtype("auto", torch.device("cuda")) == expected


def test_a_named_type_is_taken_as_it_is_and_an_unknown_one_refused() -> None:
    assert compute_dtype("float16", CPU) == torch.float16
    with pytest.raises(UserError, match="dtype fp8: expected auto, float32, bfloat16, float16"):
        compute_dtype("fp8", CPU)
