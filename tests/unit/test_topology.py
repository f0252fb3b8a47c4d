from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kvops import topology
from kvops.errors import KvopsError
from kvops.topology import PRESETS, Mode, load_topology, preset_text


def problem_of(tmp_path: Path, text: str) -> str:
    file = tmp_path / "kvops.yaml"
    file.write_text(text)
    with pytest.raises(KvopsError) as caught:
        load_topology(file, preset=None if "preset:" in text else "cpu-demo")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("model: m\nmodde: pull\n", "kvops.yaml:2: unknown key modde; did you mean mode?"),
        ("prefill:\n  replica: 2\n", "kvops.yaml:2: unknown key prefill.replica; did you mean replicas?"),
        ("kv:\n  ttl: 4\n", "kvops.yaml:2: unknown key kv.ttl; did you mean decoder_ttl?"),
        (
            "zzz: 1\n",
            "kvops.yaml:1: unknown key zzz; known here: model, mode, platform, preset, prefill, decode, kv, transport, "
            "router, observability, kubernetes, slurm, compose",
        ),
        (
            "decode:\n  replicas: 0\n",
            "kvops.yaml:2: decode.replicas is 0 but should be greater than or equal to 1; change the value",
        ),
        (
            "mode: pushh\n",
            "kvops.yaml:1: mode is 'pushh' but should be 'pull', 'bidirectional' or 'push'; change the value",
        ),
        (
            "\nkv:\n  decoder_ttl: soon\n",
            "kvops.yaml:3: kv.decoder_ttl is 'soon' but should be a valid integer, unable to parse string as an integer; "
            "change the value",
        ),
        ("prefill: 3\n", "kvops.yaml:1: prefill is 3 but should be a section with keys of its own; indent them"),
        ("preset: p5n\n", "kvops.yaml:1: preset 'p5n' does not exist; did you mean p5en?"),
        (
            "preset: p5en\nprefill:\n  replicas: 2\n",
            "kvops.yaml:2: prefill needs 8 devices on a host (tensor_parallel 4 x 2 replicas) but devices lists 4; list 8 "
            "devices, or lower tensor_parallel or replicas",
        ),
        (
            "preset: p5en\ndecode:\n  devices: 3-6\n",
            "kvops.yaml:3: prefill and decode both use device 3 of host own; give each role its own devices",
        ),
        (
            "decode:\n  devices: [1, 1]\n",
            "kvops.yaml:2: decode.devices names a device twice: [1, 1]; name each once",
        ),
        (
            "mode: push\ndecode:\n  args: ['--kv-transfer-config={\"bidirectional_kv_xfer\": true}']\n",
            "kvops.yaml:3: mode push cannot be combined with bidirectional_kv_xfer in decode.args; choose one: vLLM has "
            "no push connector that reads back",
        ),
        (
            "prefill:\n  port: 8100\n  replicas: 2\ndecode:\n  port: 8101\n",
            "kvops.yaml:5: port of decode-0 and port of prefill-1 are both 8101 on 127.0.0.1; give each its own port, or "
            "leave ports out and free ones are found",
        ),
        (
            "router:\n  port: 8200\ndecode:\n  port: 8200\n",
            "kvops.yaml:4: port of decode-0 and router.port are both 8200 on 127.0.0.1; give each its own port, or leave "
            "ports out and free ones are found",
        ),
        (
            "decode:\n  side_channel_port: 65535\n  data_parallel: 2\n",
            "kvops.yaml:2: side_channel_port of decode-0 would be 65536, beyond 65535; start lower",
        ),
        (
            "prefill:\n  hosts: [0.0.0.0]\n",
            "kvops.yaml:2: prefill.hosts has 0.0.0.0, which is what the peer would dial as side-channel host; give the "
            "engine's own address",
        ),
        (
            "prefill:\n  hosts: [localhost]\ndecode:\n  hosts: [10.0.0.2]\n",
            "kvops.yaml:2: prefill.hosts has localhost but the fleet spans machines (10.0.0.2 too), and a peer there that "
            "dials localhost reaches itself; give the engine's own address",
        ),
        ("model: a\nmodel: b\n", "kvops.yaml:2: model is already set on line 1; keep one of them"),
        ("- x\n", "kvops.yaml:1: expected 'key: value' lines; start with 'model: ...'"),
        (
            "a: [\n",
            "kvops.yaml:2: not valid YAML: expected the node content, but found '<stream end>'; mend that line",
        ),
    ],
)
def test_a_wrong_file_gives_one_sentence_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    assert problem_of(tmp_path, text) == sentence


def test_every_problem_of_a_file_is_reported_at_once(tmp_path: Path) -> None:
    assert problem_of(tmp_path, "router:\n  prot: 3\nmode: x\n").count("\n") == 1


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(KvopsError, match=r"cannot read .*nowhere\.yaml: No such file"):
        load_topology(tmp_path / "nowhere.yaml")


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "kvops.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KvopsError, match="is not a text file"):
        load_topology(file)


@pytest.mark.parametrize("written", ["1", '"1"', "[1]", "1-1"])
def test_one_device_may_stand_alone(tmp_path: Path, written: str) -> None:
    file = tmp_path / "kvops.yaml"
    file.write_text(f"preset: cuda-local\nprefill:\n  devices: {written}\ndecode:\n  devices: 0\n")
    topology = load_topology(file)
    assert (topology.prefill.devices, topology.decode.devices) == ((1,), (0,))


def test_devices_that_are_none_are_refused_in_plain_words(tmp_path: Path) -> None:
    assert "prefill.devices is 'gpu0' but should be a list" in problem_of(tmp_path, "prefill:\n  devices: gpu0\n")


def test_a_huge_range_of_devices_is_refused_without_building_it(tmp_path: Path) -> None:
    assert "prefill.devices" in problem_of(tmp_path, "prefill:\n  devices: 0-99999999999\n")


def test_numbers_in_env_and_args_need_no_quotes(tmp_path: Path) -> None:
    file = tmp_path / "kvops.yaml"
    file.write_text("decode:\n  env: {OMP_NUM_THREADS: 2}\n  args: [--max-num-seqs, 8]\n")
    decode = load_topology(file, preset="cpu-demo").decode
    assert (decode.env["OMP_NUM_THREADS"], decode.args[-2:]) == ("2", ("--max-num-seqs", "8"))


def test_arguments_of_the_file_follow_those_of_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "kvops.yaml"
    file.write_text("prefill:\n  args: [--block-size=64]\n")
    args = load_topology(file, preset="cpu-demo").prefill.args
    assert "--block-size=32" in args
    assert args[-1] == "--block-size=64"


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvops.yaml"
    file.write_text("mode: pull\ndecode:\n  replicas: 3\n  env: {A: b}\n")
    result = load_topology(file, {"mode": "push", "decode": {"replicas": 2}}, "cpu-demo")
    assert (result.mode, result.decode.replicas, result.decode.env["A"]) == (Mode.PUSH, 2, "b")


def test_an_empty_file_is_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "kvops.yaml"
    file.write_text("# nothing yet\n")
    assert load_topology(file, preset="cpu-demo") == load_topology(preset="cpu-demo")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_valid_topology(preset: str) -> None:
    assert load_topology(preset=preset).preset == preset


@pytest.mark.parametrize("preset", ["p5", "p5en", "p6-b200", "trn1", "trn2"])
def test_efa_presets_name_the_efa_backend_and_provider(preset: str) -> None:
    transport = load_topology(preset=preset).transport
    assert transport.backends == ("LIBFABRIC",)
    assert transport.env["FI_PROVIDER"] == "efa"


@pytest.mark.parametrize("preset", ["p5", "p5en", "p6-b200", "trn1", "trn2"])
def test_efa_presets_advertise_the_machines_own_address(preset: str) -> None:
    result = load_topology(preset=preset)
    assert result.prefill.hosts == result.decode.hosts == ("own",)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_gives_a_reason_beside_its_settings(preset: str) -> None:
    text = preset_text(preset)
    assert text.startswith("# ")
    assert text.count("#") >= 3
    assert yaml.safe_load(text)


@pytest.mark.parametrize(("instance_type", "preset"), [("p5en.48xlarge", "p5en"), ("trn2.48xlarge", "trn2")])
def test_the_preset_follows_the_instance_type(monkeypatch: pytest.MonkeyPatch, instance_type: str, preset: str) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_: instance_type + "\n")
    assert topology.find_preset() == preset


def test_without_an_accelerator_the_preset_is_the_cpu_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_: "Standard PC (Q35 + ICH9, 2009)\n")
    monkeypatch.setattr(Path, "exists", lambda *_: False)
    assert topology.find_preset() == "cpu-demo"
