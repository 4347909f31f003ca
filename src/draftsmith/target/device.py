"""Where tensors live and in which type arithmetic runs: one answer for extraction, training and measuring.

Owns the meaning of the settings `device` and `dtype`. Half precision on a CPU pays only with AVX-512-BF16 or AMX
instructions; elsewhere it is emulated and slower than float32.
"""

from __future__ import annotations

import torch

from draftsmith.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """The torch device for a `device` setting; `auto` is cuda where there is one, else cpu.

    Raises:
        UserError: the name is no torch device, or the machine lacks it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0][:120]
        raise UserError(f"device {name}: expected auto, cpu, cuda or cuda:N, and that it is here; {reason}") from None
    return device


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype for a `dtype` setting; `auto` is bfloat16 where the device computes in it natively.

    Raises:
        UserError: the name is none of auto, float32, bfloat16, float16.
    """
    if name == "auto":
        return torch.bfloat16 if _native_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise UserError(f"dtype {name}: expected auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _native_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8  # is_bf16_supported() also says yes to emulation
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return False
