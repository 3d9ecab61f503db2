"""Every example runs, as a user would run it."""

from __future__ import annotations

import ast
import io
import json
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path

import openai
import prometheus_client
import pytest

import batchkit

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """``run(name, *arguments)``: what the example prints."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_example_is_run_here():
    tested = {
        "chat.py",
        "compare_policies.py",
        "custom_scheduler.py",
        "embed_in_service.py",
        "fair_tenants.py",
        "offline_batch.py",
        "openai_server.py",
        "prometheus_metrics.py",
        "stream.py",
    }
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_compare_policies(run):
    shown = run("compare_policies.py")
    assert shown.startswith("SIMULATED: no model ran.") and "RooflineCost" in shown
    told_the_truth, told_the_cap, by_order = shown.split("\n\n")[1:4]
    assert "true lengths" in told_the_truth and "512 is declared" in told_the_cap
    for table in (told_the_truth, told_the_cap):
        rows = rows_of(table)
        ratio = {name: float(values[2].rstrip("x")) for name, values in rows.items()}
        assert ratio["static"] == 1
        assert ratio["static, padded to the longest of all"] < 1 < ratio["static, finished dropped"]
        assert max(ratio.values()) == max(ratio["paged"], ratio["chunked"])
        assert ratio["orca, reserves max_tokens"] < ratio["optimistic"] < ratio["chunked"]
    assert "two tenants" in by_order
    order = rows_of(by_order)
    mean, chats = ({name: float(values[i].rstrip("s")) for name, values in order.items()} for i in (0, 2))
    late = {name: float(values[4].rstrip("%")) for name, values in order.items()}
    fcfs = "chunked (first come first served)"
    assert mean["shortest-remaining"] < mean["shortest-first"] < mean[fcfs]
    assert all(chats[name] < chats[fcfs] for name in order if name != fcfs)
    assert late["least-slack"] == 0 < late[fcfs]


def rows_of(table):
    return {line[2:39].strip(): line[39:].split() for line in table.splitlines()[3:]}


def test_every_policy_is_compared():
    source = (EXAMPLES / "compare_policies.py").read_text(encoding="utf-8")
    ours = {name for name in batchkit.__all__ if name.endswith("Scheduler") and name != "Scheduler"}
    assert {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)} >= ours


def test_custom_scheduler(run):
    shown = run("custom_scheduler.py")
    assert "InteractiveFirst keeps the rules and starves nobody" in shown and "SIMULATED" in shown
    interactive, others = (
        {line.split()[0]: float(line.split()[i]) for line in shown.splitlines()[-3:]} for i in (1, 3)
    )
    assert interactive["InteractiveFirst"] < 0.5 * interactive["ChunkedPrefillScheduler"]
    assert others["InteractiveFirst"] < 1.2 * others["ChunkedPrefillScheduler"]


def test_fair_tenants(run):
    shown = run("fair_tenants.py")
    assert shown.startswith("SIMULATED: no model ran")
    calm_fcfs, flood_fcfs, calm_fair, flood_fair = (float(line.split()[5]) for line in shown.splitlines()[-4:])
    assert calm_fair < 0.2 * calm_fcfs
    assert flood_fair < 1.1 * flood_fcfs  # nothing is lost by it


def test_a_useful_policy_is_thirty_lines_and_an_ablation_three():
    source = (EXAMPLES / "custom_scheduler.py").read_text(encoding="utf-8")
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    lines = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in classes.items()}
    assert lines["InteractiveFirst"] <= 30
    assert lines["CheapestVictim"] == 3


@pytest.mark.slow
def test_offline_batch(run, smollm2, tmp_path):
    shown = run("offline_batch.py", smollm2, "--max-tokens", "4", "--dtype", "float32")
    assert "' Paris" in shown
    assert "4 prompts in" in shown

    rows = [
        {"prompt": "The capital of France is", "params": {"max_tokens": 3, "temperature": 0}},
        {"prompt": "word " * 9000, "params": {"max_tokens": 3}},
    ]
    source = tmp_path / "prompts.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    shown = run("offline_batch.py", smollm2, str(source), "--dtype", "float32")
    assert "' Paris" in shown
    assert "(error)" in shown and "8192 tokens in all" in shown


@pytest.mark.slow
def test_stream(run, smollm2):
    shown = run("stream.py", smollm2, "--max-tokens", "4", "--dtype", "float32")
    deltas = {str(i): "" for i in range(3)}
    finals = {}
    for line in shown.splitlines():
        position, _, text = line.partition(": ")
        if text.startswith("["):
            assert "first token after" in text
            finals[position] = ast.literal_eval(text.partition("] ")[2])
        else:
            assert position not in finals  # deltas come before the end
            deltas[position] += ast.literal_eval(text)
    assert deltas == finals
    assert finals["0"].startswith(" Paris")


@pytest.mark.slow
def test_chat(run, smollm2, monkeypatch):
    said = iter(["What is the capital of France?", "And of Italy?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    first, second = run(
        "chat.py", smollm2, "--max-tokens", "24", "--temperature", "0", "--dtype", "float32"
    ).splitlines()
    assert "Paris" in first
    assert "Rome" in second  # it knows what was asked before


@pytest.mark.slow
def test_chat_ends_with_the_input(run, smollm2, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run("chat.py", smollm2) == "> \n"


@pytest.mark.slow
def test_embed_in_service(run, smollm2):
    shown = run("embed_in_service.py", smollm2, "--clients", "4")
    assert "'2 plus 2 is' -> ' 4" in shown
    assert "refused: a prompt of 100001 tokens" in shown
    assert "the model by itself: ' Paris'" in shown
    assert "\n Rome.\n" in shown  # read as it was made, and left early
    metrics = dict(line.rsplit(" ", 1) for line in shown.splitlines() if line.startswith("batchkit_"))
    assert metrics["batchkit_requests_running"] == "0"
    reasons = ("length", "stop")
    assert sum(int(metrics.get(f'batchkit_requests_total{{reason="{reason}"}}', 0)) for reason in reasons) == 4
    assert metrics['batchkit_requests_total{reason="abort"}'] == "1"
    assert float(metrics["batchkit_generated_tokens_total"]) > 4 and float(metrics["batchkit_steps_total"]) > 1


def test_prometheus_metrics_are_those_of_the_engine():
    registry = prometheus_client.CollectorRegistry()
    step_metrics = runpy.run_path(str(EXAMPLES / "prometheus_metrics.py"))["step_metrics"]
    geometry = batchkit.KVGeometry(num_blocks=6, block_size=4, max_model_len=64, vocab_size=50)
    scheduler = batchkit.PagedScheduler(batchkit.PagedAllocator(6, 4), max_num_seqs=4)
    with batchkit.Engine(batchkit.SimulatedRunner(geometry), scheduler, on_step=step_metrics(registry)) as engine:
        engine.generate([[i, i] for i in range(6)], batchkit.SamplingParams(max_tokens=9))
        stats = engine.stats()
    shown = prometheus_client.generate_latest(registry).decode()
    values = dict(line.rsplit(" ", 1) for line in shown.splitlines() if not line.startswith("#"))
    read = {name.removeprefix("batchkit_"): float(value) for name, value in values.items()}
    assert read['tokens_total{kind="computed"}'] == stats.computed_tokens
    assert read['tokens_total{kind="generated"}'] == stats.generated_tokens == 54
    assert read['events_total{kind="preempted"}'] == stats.num_preemptions > 0
    assert read['events_total{kind="finished"}'] == 6 and read['events_total{kind="failed step"}'] == 0
    assert read['step_seconds_count{part="execute"}'] == stats.num_steps
    assert read['now{what="running"}'] == read['now{what="waiting"}'] == 0


@pytest.mark.slow
def test_prometheus_metrics(run, smollm2):
    shown = run("prometheus_metrics.py", smollm2, "--port", "0", "--dtype", "float32")
    assert 'batchkit_events_total{kind="finished"} 8.0' in shown


@pytest.mark.slow
def test_openai_server(smollm2):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(EXAMPLES / "openai_server.py"), smollm2, "--served-name", "smol"]
    command += ["--port", str(port), "--dtype", "float32", "--kv-memory", "64MiB"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            for line in server.stderr:  # until it can be asked
                if "running on" in line:
                    break
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
                asked = {"model": "smol", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
                chunks = client.chat.completions.create(**asked, temperature=0, max_tokens=10, stream=True)
                assert "Paris" in "".join(chunk.choices[0].delta.content for chunk in chunks)
            server.send_signal(signal.SIGINT)
            assert "Traceback" not in server.stderr.read()
        finally:
            server.kill()
