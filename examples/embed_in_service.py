"""A service with a model of its own: one thread owns the engine, any thread may ask, metrics for Prometheus.

    python examples/embed_in_service.py MODEL [--clients 8]

The engine is a plain object with one owner. So the service's thread is the only one that calls it; requests reach it
through a queue, answers leave it through futures. `Engine.abort` alone may be called from anywhere.
"""

from __future__ import annotations

import argparse
import logging
import queue
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchkit import Engine, RequestOutput, SamplingParams, StepReport

Ask = tuple[Any, SamplingParams, "Future[RequestOutput]"]


class Service:
    """Answers prompts with a model that the caller keeps.

    Args:
        model, tokenizer: of transformers. The weights are shared; the model may be used beside the service, between
            steps, by whoever holds `lock`.
        options: see `Engine.from_model`.
    """

    def __init__(self, model: Any, tokenizer: Any, **options: Any) -> None:
        self.lock = threading.Lock()
        self._counts = Counter(steps_total=0, failed_steps_total=0, schedule_seconds_total=0, execute_seconds_total=0)
        self._engine = Engine.from_model(model, tokenizer, on_step=self._observe, **options)
        self._inbox: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()
        self._waiting: dict[str, Future[RequestOutput]] = {}
        self._thread = threading.Thread(target=self._run, name="batchkit", daemon=True)
        self._thread.start()

    def submit(self, prompt: Any, params: SamplingParams) -> Future[RequestOutput]:
        """From any thread: text, token ids or messages in, the final output later."""
        if not self._thread.is_alive():
            raise RuntimeError("the service has ended")
        future: Future[RequestOutput] = Future()
        self._inbox.put((prompt, params, future))
        return future

    def close(self) -> None:
        """Finish what has been submitted, then free the KV memory."""
        self._inbox.put(None)
        self._thread.join()

    def metrics(self) -> str:
        """The lines that Prometheus reads, from any thread."""
        stats = self._engine.stats()
        values = {
            "requests_waiting": stats.num_waiting,
            "requests_running": stats.num_running,
            "kv_blocks_free": stats.num_free_blocks,
            "prompt_tokens_total": stats.prompt_tokens,
            "generated_tokens_total": stats.generated_tokens,
            "preemptions_total": stats.num_preemptions,
            **self._counts,
        }
        lines = [f"batchkit_{name} {value:g}" for name, value in values.items()]
        lines += [f'batchkit_requests_total{{reason="{reason}"}} {n}' for reason, n in stats.finished.items()]
        return "\n".join(lines) + "\n"

    def _observe(self, report: StepReport) -> None:
        self._counts["steps_total"] += 1
        self._counts["schedule_seconds_total"] += report.schedule_s
        self._counts["execute_seconds_total"] += report.execute_s
        self._counts["failed_steps_total"] += report.error is not None

    def _run(self) -> None:
        is_open = True
        try:
            while is_open or self._engine.has_unfinished():
                is_open = self._take(is_open)
                with self.lock:
                    outputs = self._engine.step()
                for output in outputs:
                    if output.finished:
                        self._waiting.pop(output.request_id).set_result(output)
                self._engine.wait()
        except Exception as failure:  # the device is broken, say; nobody is left without an answer
            for future in self._waiting.values():
                future.set_exception(failure)
            raise
        finally:
            self._engine.close()

    def _take(self, is_open: bool) -> bool:
        """Queue what has been submitted; sleep while there is nothing to do. False: nothing more comes."""
        while is_open:
            try:
                ask = self._inbox.get(block=not self._engine.has_unfinished())
            except queue.Empty:
                return True
            if ask is None:
                return False
            prompt, params, future = ask
            if not future.set_running_or_notify_cancel():
                continue
            try:
                self._waiting[self._engine.add_request(prompt, params)] = future
            except Exception as error:  # this one cannot be taken, with the numbers; the others go on
                future.set_exception(error)
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("--clients", type=int, default=8)
    args = parser.parse_args()

    logging.basicConfig(level=logging.WARNING)  # batchkit logs to "batchkit" and sets up nothing
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    service = Service(model, tokenizer, kv_memory="256MiB", max_num_seqs=16)

    params = SamplingParams(temperature=0, max_tokens=12)
    prompts = [f"{i} plus {i} is" for i in range(args.clients)]
    with ThreadPoolExecutor(args.clients) as clients:  # each waits for its own answer, as request handlers do
        for prompt, output in zip(
            prompts, clients.map(lambda prompt: service.submit(prompt, params).result(), prompts), strict=True
        ):
            print(f"{prompt!r} -> {output.text!r}")

    try:
        service.submit("word " * 100_000, params).result()
    except ValueError as error:
        print(f"refused: {error}")
    with service.lock, torch.no_grad():  # the model is the caller's still
        logits = model(tokenizer("The capital of France is", return_tensors="pt").input_ids).logits
    print(f"the model by itself: {tokenizer.decode(logits[0, -1].argmax())!r}\n")
    print(service.metrics(), end="")
    service.close()


if __name__ == "__main__":
    main()
