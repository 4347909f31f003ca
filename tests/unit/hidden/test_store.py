from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftsmith.artifacts import write_json
from draftsmith.errors import UserError
from draftsmith.hidden.store import SHARDS, HiddenStore, ShardWriter, States, estimate_bytes


def states(number: int, rows: int = 6, generated: int = 4) -> States:
    generator = torch.Generator().manual_seed(number)
    return States(
        torch.randn(rows, 12, generator=generator).bfloat16(),
        torch.randn(generated, 4, generator=generator).bfloat16(),
        torch.randint(0, 99, (generated,), generator=generator, dtype=torch.int32),
    )


def write(folder: Path, numbers: range, *, finish: bool = True) -> ShardWriter:
    folder.mkdir(exist_ok=True)
    writer = ShardWriter(folder, shard_bytes=1)  # a shard per trace
    for number in numbers:
        if f"t{number}" not in writer.done():
            writer.add(f"t{number}", states(number), 3, 1.0)
    if finish:
        writer.finish()
        write_json(folder / "target.json", {"name": "toy"})
    return writer


def test_states_come_back_bit_for_bit(tmp_path: Path) -> None:
    folder = tmp_path / "hidden"
    folder.mkdir()
    writer = ShardWriter(folder, shard_bytes=1 << 20)  # several traces in one shard
    for number, rows in enumerate((6, 9, 7)):
        writer.add(f"t{number}", states(number, rows), rows - 3, 1.0)
    assert len(writer.finish()) == 3
    write_json(folder / "target.json", {"name": "toy"})
    store = HiddenStore(folder)
    assert store.trace_ids == {"t0", "t1", "t2"}
    for number, rows in enumerate((6, 9, 7)):
        found, made = store.get(f"t{number}"), states(number, rows)
        assert torch.equal(found.aux, made.aux)
        assert torch.equal(found.final, made.final)
        assert torch.equal(found.argmax, made.argmax)


def test_damaged_shards_are_made_again_and_whole_ones_are_left_alone(tmp_path: Path) -> None:  # P34
    folder = tmp_path / "hidden"
    write(folder, range(5), finish=False)
    names = [f"states-{number:05}.safetensors" for number in range(5)]
    cut = (folder / names[3]).read_bytes()
    (folder / names[3]).write_bytes(cut[: len(cut) * 6 // 10])
    flipped = bytearray((folder / names[4]).read_bytes())
    flipped[-1] ^= 1
    (folder / names[4]).write_bytes(flipped)
    (folder / "states-00009.tmp").write_bytes(b"stray")
    before = {name: (folder / name).stat().st_mtime_ns for name in names[:3]}

    writer = ShardWriter(folder, shard_bytes=1)
    assert writer.done() == {"t0", "t1", "t2"}
    assert not (folder / "states-00009.tmp").exists()
    write(folder, range(5))
    assert {name: (folder / name).stat().st_mtime_ns for name in names[:3]} == before
    store = HiddenStore(folder)
    assert store.trace_ids == {f"t{number}" for number in range(5)}
    for number in range(5):
        assert torch.equal(store.get(f"t{number}").aux, states(number).aux)


def test_a_shard_missing_in_the_middle_is_made_again_under_its_own_name(tmp_path: Path) -> None:  # P34
    folder = tmp_path / "hidden"
    write(folder, range(3), finish=False)
    (folder / "states-00001.safetensors").unlink()
    write(folder, range(3))
    store = HiddenStore(folder)
    assert all(torch.equal(store.get(f"t{n}").final, states(n).final) for n in range(3))


def test_a_torn_log_line_costs_only_its_own_shard(tmp_path: Path) -> None:  # P34
    folder = tmp_path / "hidden"
    write(folder, range(3), finish=False)
    log = (folder / SHARDS).read_bytes()
    (folder / SHARDS).write_bytes(log[:-20])
    assert ShardWriter(folder, 1).done() == {"t0", "t1"}
    write(folder, range(3))
    assert [json.loads(line)["name"] for line in (folder / SHARDS).read_text().split("\n")[:-1]] == [
        f"states-{number:05}.safetensors" for number in range(3)
    ]


def test_a_changed_shard_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    folder = tmp_path / "hidden"
    write(folder, range(2))
    shard = folder / "states-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    store = HiddenStore(folder)
    assert store.get("t0").aux.shape == (6, 12)
    with pytest.raises(UserError, match=r"states-00001.safetensors: does not match its checksum"):
        store.get("t1")


def test_an_unknown_trace_is_named(tmp_path: Path) -> None:
    write(tmp_path / "hidden", range(1))
    with pytest.raises(UserError, match="no hidden states for trace t7"):
        HiddenStore(tmp_path / "hidden").get("t7")


def test_a_folder_without_a_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"found no index\.parquet"):
        HiddenStore(tmp_path)


def test_the_estimate_is_the_one_of_the_field_case() -> None:  # P33
    # 10,000 rows of 2,000 tokens, hidden 4096, three aux and one final state in 2 bytes each.
    assert estimate_bytes(20_000_000, 20_000_000, 4096) == 655_360_000_000
    assert estimate_bytes(1, 1, 4096) == 32 * 1024
