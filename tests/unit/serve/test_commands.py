from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from draftsmith.__main__ import main
from draftsmith.artifacts import MANIFEST, write_json
from draftsmith.errors import UserError
from draftsmith.recipe import ServeSettings
from draftsmith.serve.commands import VLLM_PYTHON, command, elsewhere, launch_of, log_name


def make_run(run: Path, *engines: str, measured: int | None = None, gguf: bool = True, positions: int = 4096) -> Path:
    """What serving reads of a run, and nothing else."""
    (run / "hidden").mkdir(parents=True)
    config = {"max_position_embeddings": positions, "dtype": "bfloat16"}
    write_json(run / "hidden" / "target.json", {"name": "toy/target", "config": config})
    for engine in engines:
        (run / "export" / engine).mkdir(parents=True)
        write_json(run / "export" / MANIFEST, {})
    if gguf and "llamacpp" in engines:
        (run / "export" / "llamacpp" / "target.gguf").touch()
    if measured is not None:
        (run / "measure").mkdir()
        write_json(run / "measure" / MANIFEST, {})
        write_json(run / "measure" / "result.json", {"draft_tokens": measured})
    return run


def words(run: Path, *extra: str, **settings: Any) -> list[str]:
    return command(launch_of(run, ServeSettings(**settings), extra, {}))


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


# P40
def test_vllm_is_told_the_method_the_draft_and_the_tokens(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "vllm", measured=4)
    found = words(run, engine="vllm", python="/opt/vllm/bin/python")
    assert found[:3] == ["/opt/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    draft = {"method": "eagle3", "model": str(run / "export" / "vllm"), "num_speculative_tokens": 4}
    assert json.loads(after(found, "--speculative-config")) == draft
    assert after(found, "--model") == "toy/target"
    assert after(found, "--dtype") == "bfloat16"
    assert after(found, "--max-model-len") == "4096"
    assert "--max-num-seqs" not in found


def test_vllm_that_hands_out_hidden_states_takes_the_draft_s_layers_and_no_draft(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "llamacpp", "vllm")
    write_json(run / "export" / "vllm" / "config.json", {"eagle_aux_hidden_state_layer_ids": [2, 15, 27]})
    found = words(run, hidden_states=str(tmp_path / "states"))
    extract = json.loads(after(found, "--speculative-config"))
    assert (extract["method"], extract["num_speculative_tokens"]) == ("extract_hidden_states", 1)
    assert extract["draft_model_config"]["hf_config"] == {"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}
    connector = json.loads(after(found, "--kv-transfer-config"))
    assert connector["kv_connector_extra_config"] == {"shared_storage_path": str(tmp_path / "states")}
    assert found.count("--speculative-config") == 1


# P40
def test_sglang_is_told_the_algorithm_and_one_token_more(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "sglang")
    found = words(run, parallel=8, context=1024)
    assert found[1:3] == ["-m", "sglang.launch_server"]
    assert after(found, "--speculative-algorithm") == "EAGLE3"
    assert after(found, "--speculative-draft-model-path") == str(run / "export" / "sglang")
    assert after(found, "--speculative-num-steps") == "3"
    assert after(found, "--speculative-num-draft-tokens") == "4"
    assert after(found, "--context-length") == "1024"
    assert after(found, "--max-running-requests") == "8"


def test_llamacpp_gets_the_context_of_all_slots_together(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "llamacpp")
    found = words(run, parallel=2, context=512)
    assert found[1:3] == ["-m", "draftsmith.serve.llamacpp"]
    assert after(found, "--model") == str(run / "export" / "llamacpp" / "target.gguf")
    assert after(found, "--draft") == str(run / "export" / "llamacpp" / "draft.gguf")
    assert (after(found, "--slots"), after(found, "--context")) == ("2", "1024")


def test_llamacpp_elsewhere_has_the_type_and_no_backend_sampling(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "llamacpp")
    line = shlex.split(elsewhere(launch_of(run, ServeSettings(), ("--threads", "1"), {})))
    assert line[0] == "llama-server"
    assert after(line, "--spec-type") == "draft-eagle3"
    assert "--no-spec-draft-backend-sampling" in line
    assert "--metrics" in line
    assert "--threads" not in line  # an argument of this machine's launcher


def test_the_command_for_elsewhere_names_files_by_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(Path("run"), "llamacpp", "vllm")
    line = shlex.split(elsewhere(launch_of(run, ServeSettings(engine="llamacpp"), (), {})))
    assert after(line, "--model") == str(tmp_path / "run" / "export" / "llamacpp" / "target.gguf")
    line = shlex.split(elsewhere(launch_of(run, ServeSettings(engine="vllm"), (), {})))
    assert line[:3] == ["vllm", "serve", "toy/target"]  # a hub id stays one
    assert json.loads(after(line, "--speculative-config"))["model"] == str(tmp_path / "run" / "export" / "vllm")


def test_engines_served_side_by_side_have_a_log_each(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "vllm")
    write_json(run / "export" / "vllm" / "config.json", {"eagle_aux_hidden_state_layer_ids": [2, 15, 27]})
    kinds: list[dict[str, Any]] = [{}, {"baseline": True}, {"hidden_states": "states"}]
    logs = [log_name(launch_of(run, ServeSettings(**kind), (), {})) for kind in kinds]
    assert logs == ["serve-vllm.log", "serve-vllm-baseline.log", "serve-vllm-states.log"]


def test_a_targets_long_context_is_not_allocated_by_llamacpp_unasked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "llamacpp", "vllm", positions=262144)
    assert after(words(run, engine="llamacpp", parallel=1), "--context") == "8192"
    assert after(words(run, engine="vllm"), "--max-model-len") == "262144"


def test_the_baseline_has_the_same_target_and_no_draft(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "vllm", "llamacpp", "sglang")
    for engine, flag in (
        ("vllm", "--speculative-config"),
        ("sglang", "--speculative-algorithm"),
        ("llamacpp", "--draft"),
    ):
        drafting, alone = words(run, engine=engine), words(run, engine=engine, baseline=True)
        assert flag in drafting and flag not in alone
        assert {"--draft-tokens"} | set(drafting) > set(alone)


def test_the_baseline_needs_no_export(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert after(words(run, engine="vllm", baseline=True), "--model") == "toy/target"


def test_what_was_exported_is_served_llamacpp_first(tmp_path: Path) -> None:
    assert launch_of(make_run(tmp_path / "a", "sglang"), ServeSettings(), (), {}).engine == "sglang"
    assert launch_of(make_run(tmp_path / "b", "vllm", "llamacpp"), ServeSettings(), (), {}).engine == "llamacpp"


def test_further_arguments_come_last_so_that_they_win(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "vllm")
    assert words(run, "--dtype", "float32")[-2:] == ["--dtype", "float32"]
    assert shlex.split(elsewhere(launch_of(run, ServeSettings(), ("--enforce-eager",), {})))[-1] == "--enforce-eager"


def test_the_interpreter_of_vllms_environment_is_taken_from_the_environment(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "vllm", "llamacpp")
    environment = {VLLM_PYTHON: "/opt/vllm/bin/python"}
    assert launch_of(run, ServeSettings(engine="vllm"), (), environment).python == "/opt/vllm/bin/python"
    assert launch_of(run, ServeSettings(engine="llamacpp"), (), environment).python != "/opt/vllm/bin/python"


@pytest.mark.parametrize(
    ("engines", "settings", "message"),
    [
        ((), {}, "nothing is exported yet; `draftsmith export --run"),
        (("vllm",), {"engine": "sglang"}, "sglang: not exported; `draftsmith export --run .* --engine sglang`"),
        (
            ("llamacpp",),
            {"hidden_states": "s", "engine": "llamacpp"},
            "--hidden-states: expected --engine vllm, found lla",
        ),
        (("llamacpp",), {"hidden_states": "s"}, "vllm: not exported"),
        (("vllm",), {"hidden_states": "s", "baseline": True}, "--hidden-states: expected no --baseline beside it"),
        (("llamacpp",), {"dtype": "float32"}, "--dtype float32: llama.cpp computes in the type of .* --target-gguf"),
        (("llamacpp",), {"target": "nope.gguf"}, "--target nope.gguf: expected a GGUF file, found none"),
        (("vllm",), {"context": 5000}, "--context 5000: target and draft were made for 4096 ids at most"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    engines: tuple[str, ...], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        launch_of(make_run(tmp_path / "run", *engines), ServeSettings(**settings), (), {})


def test_llamacpp_without_a_file_of_the_target_says_how_to_get_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "llamacpp", gguf=False)
    with pytest.raises(UserError, match="export with --target-gguf bfloat16, or give --target FILE.gguf"):
        launch_of(run, ServeSettings(), (), {})
    other = tmp_path / "other.gguf"
    other.touch()
    assert launch_of(run, ServeSettings(target=str(other)), (), {}).target == str(other)


def test_an_address_for_every_interface_is_asked_on_this_machine(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "vllm")
    for host, url in (("0.0.0.0", "http://127.0.0.1:8000"), ("::1", "http://[::1]:8000")):
        assert launch_of(run, ServeSettings(host=host), (), {}).url == url


@pytest.mark.parametrize("start", [["serve", "RUN"], ["serve", "--run", "RUN"]])
def test_a_dry_run_prints_the_command_and_starts_nothing(
    start: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", "vllm")
    arguments = [str(run) if word == "RUN" else word for word in start]
    assert main([*arguments, "--dry-run", "--port", "9000", "--", "--enforce-eager"]) == 0
    printed = shlex.split(capsys.readouterr().out)
    assert after(printed, "--port") == "9000"
    assert printed[-1] == "--enforce-eager"
    assert sorted(path.name for path in run.iterdir()) == ["export", "hidden"]


def test_a_mistyped_flag_is_not_taken_for_an_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", "vllm")
    assert main(["serve", str(run), "--dry-run", "--enigne", "vllm"]) == 2
    assert "--enigne" in capsys.readouterr().err
