"""The KV memory: sizes, budgets and copies."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

import batchkit.hf.kv_pool as kv_pool
from batchkit.errors import OutOfKVMemory
from batchkit.hf.backends.base import LayerSpec
from batchkit.hf.kv_pool import KVPool, block_bytes, free_memory, num_blocks_for
from batchkit.sizes import parse_bytes
from batchkit.types import BlockCopy

CPU = torch.device("cpu")


def layer(
    index: int = 0, heads: int = 2, key: int = 8, value: int = 6, dtype: torch.dtype = torch.float32
) -> LayerSpec:
    return LayerSpec(index, 4, heads, key, value, dtype, CPU)


LAYERS = [layer(0), layer(1, heads=1, key=4, value=4, dtype=torch.bfloat16)]
EACH = 4 * 2 * (8 + 6) * 4 + 4 * 1 * (4 + 4) * 2  # bytes of a block of 4 tokens


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (123, 123),
        ("123", 123),
        ("2GiB", 2 << 30),
        ("500MB", 500_000_000),
        ("1.5 GiB", 3 << 29),
        (" 64 kib ", 65536),
        ("7kB", 7000),
        ("1TB", 10**12),
        ("1tib", 1 << 40),
        ("9B", 9),
        ("1" + "0" * 400, 10**400),
    ],
)
def test_parse_bytes(text: int | str, size: int) -> None:
    assert parse_bytes("kv_memory", text) == size


@pytest.mark.parametrize("text", ["", "GiB", "2 apples", "-1GB", "1e9", "2G", 0, -5, "0.1B"])
def test_parse_bytes_refuses(text: int | str) -> None:
    with pytest.raises(ValueError, match="swap_memory must be"):
        parse_bytes("swap_memory", text)


@pytest.mark.parametrize("value", [None, 1.5, True, [1]])
def test_parse_bytes_refuses_types(value: object) -> None:
    with pytest.raises(TypeError, match="kv_memory must be"):
        parse_bytes("kv_memory", value)  # type: ignore[arg-type]


def test_block_bytes_by_device() -> None:
    assert block_bytes(LAYERS, 4) == {CPU: EACH}
    far = LayerSpec(2, 4, 2, 8, 6, torch.float32, torch.device("meta"))
    assert block_bytes([*LAYERS, far], 4) == {CPU: EACH, torch.device("meta"): 4 * 2 * 14 * 4}


def test_each_layers_kv_lives_where_the_layer_computes() -> None:
    far = LayerSpec(2, 4, 2, 8, 6, torch.float32, torch.device("meta"))
    pool = KVPool([*LAYERS, far], num_blocks=3, block_size=4)
    assert [kv.key.device.type for kv in pool.layers] == ["cpu", "cpu", "meta"]


class TestBudget:
    def blocks(self, **changes: object) -> int:
        arguments = {"block_size": 4, "kv_memory": None, "num_kv_blocks": None, "max_blocks": 1000} | changes
        return num_blocks_for(LAYERS, **arguments)  # type: ignore[arg-type]

    def test_given(self) -> None:
        assert self.blocks(num_kv_blocks=7) == 7
        assert self.blocks(kv_memory=EACH * 5 + 1) == 5
        assert self.blocks(kv_memory=EACH) == 1
        assert self.blocks(kv_memory="1MB") == 1_000_000 // EACH
        assert self.blocks(kv_memory=EACH * 5000) == 5000  # what the caller gave is not cut

    def test_refused(self) -> None:
        with pytest.raises(OutOfKVMemory, match=f"{EACH - 1:,} bytes.*4 tokens takes {EACH:,} bytes"):
            self.blocks(kv_memory=EACH - 1)
        with pytest.raises(ValueError, match="not both"):
            self.blocks(kv_memory=EACH, num_kv_blocks=3)
        with pytest.raises(ValueError, match="at least 1, got 0"):
            self.blocks(num_kv_blocks=0)
        with pytest.raises(TypeError, match=r"integer, got 1\.5"):
            self.blocks(num_kv_blocks=1.5)

    def test_default_is_half_of_what_is_free(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kv_pool, "free_memory", lambda device: EACH * 21)
        assert self.blocks() == 10
        assert self.blocks(max_blocks=3) == 3
        monkeypatch.setattr(kv_pool, "free_memory", lambda device: None)
        assert self.blocks(max_blocks=12) == 12
        monkeypatch.setattr(kv_pool, "free_memory", lambda device: 2 * EACH - 1)
        with pytest.raises(OutOfKVMemory, match=f"{2 * EACH - 1:,} bytes are free on cpu"):
            self.blocks()


class TestFreeMemory:
    def put(self, root: Path, path: str, text: str) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)

    def test_what_the_system_has(self, tmp_path: Path) -> None:
        assert free_memory(CPU, root=tmp_path) is None
        self.put(tmp_path, "proc/meminfo", "MemTotal:  9000 kB\nMemAvailable:   1000 kB\n")
        assert free_memory(CPU, root=tmp_path) == 1000 * 1024

    def test_version_2(self, tmp_path: Path) -> None:
        self.put(tmp_path, "proc/meminfo", "MemAvailable: 1000 kB\n")
        self.put(tmp_path, "proc/self/cgroup", "0::/\n")
        self.put(tmp_path, "sys/fs/cgroup/memory.max", "max\n")
        self.put(tmp_path, "sys/fs/cgroup/memory.current", "500\n")
        assert free_memory(CPU, root=tmp_path) == 1000 * 1024
        self.put(tmp_path, "sys/fs/cgroup/memory.max", "900000\n")
        assert free_memory(CPU, root=tmp_path) == 899_500
        self.put(tmp_path, "sys/fs/cgroup/memory.stat", "anon 7\ninactive_file 100\nactive_file 3\n")
        assert free_memory(CPU, root=tmp_path) == 899_600
        self.put(tmp_path, "sys/fs/cgroup/memory.current", "2000000\n")
        assert free_memory(CPU, root=tmp_path) == 0

    def test_the_tightest_group_counts(self, tmp_path: Path) -> None:
        self.put(tmp_path, "proc/self/cgroup", "0::/a/b\n")
        for path, limit, used in (("", "max", 0), ("a/", 5000, 1000), ("a/b/", 9000, 500)):
            self.put(tmp_path, f"sys/fs/cgroup/{path}memory.max", f"{limit}\n")
            self.put(tmp_path, f"sys/fs/cgroup/{path}memory.current", f"{used}\n")
        assert free_memory(CPU, root=tmp_path) == 4000

    def test_version_1_seen_from_within_a_container(self, tmp_path: Path) -> None:
        self.put(tmp_path, "proc/self/cgroup", "3:cpu,cpuacct:/x\n2:memory:/docker/abc\n1:name=systemd:/\n")
        self.put(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "8000\n")
        self.put(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", "3000\n")
        self.put(tmp_path, "sys/fs/cgroup/memory/memory.stat", "cache 9\ntotal_inactive_file 500\n")
        assert free_memory(CPU, root=tmp_path) == 5500

    def test_here(self) -> None:
        free = free_memory(CPU)
        assert free is None or free > 1 << 20


def slots(pool: KVPool, block: int) -> list[torch.Tensor]:
    at = slice(block * pool.block_size, (block + 1) * pool.block_size)
    return [tensor[:, at].clone() for kv in pool.layers for tensor in (kv.key, kv.value)]


def numbered() -> KVPool:
    """A pool whose every block holds its own number, host blocks 100 more."""
    pool = KVPool(LAYERS, num_blocks=6, block_size=4, host_blocks=5)
    for block in range(6):
        for tensor in (t for kv in pool.layers for t in (kv.key, kv.value)):
            tensor[:, block * 4 : block * 4 + 4] = block
    for host in pool._host:
        for block in range(5):
            host[:, block] = 100 + block
    return pool


def contents(pool: KVPool) -> tuple[list[int], list[int]]:
    device = [{float(v) for t in slots(pool, b) for v in t.unique()} for b in range(pool.num_blocks)]
    host = [{float(v) for t in pool._host for v in t[:, b].unique()} for b in range(pool.host_blocks)]
    assert all(len(values) == 1 for values in device + host), "a block was copied in part"
    return [int(v.pop()) for v in device], [int(v.pop()) for v in host]


def test_copies_in_order() -> None:
    rng = random.Random(0)
    for _ in range(60):
        pool = numbered()
        device, host = contents(pool)
        copies = []
        for _ in range(rng.randint(1, 12)):
            kind = rng.choice(["copy", "copy", "swap_out", "swap_in"])
            source = rng.randrange(5 if kind == "swap_in" else 6)
            target = rng.randrange(5 if kind == "swap_out" else 6)
            copies.append(BlockCopy(kind, source, target))  # type: ignore[arg-type]
            read, write = (host if kind == "swap_in" else device), (host if kind == "swap_out" else device)
            write[target] = read[source]
        pool.copy(copies)
        assert contents(pool) == (device, host)
        assert all((tensor[:, 24:] == 0).all() for kv in pool.layers for tensor in (kv.key, kv.value))


def test_copy_refuses_blocks_that_do_not_exist() -> None:
    pool = numbered()
    before = contents(pool)
    for bad in (
        BlockCopy("copy", 0, 6),
        BlockCopy("swap_out", 0, 5),
        BlockCopy("swap_in", 5, 0),
        BlockCopy("copy", -1, 0),
    ):
        with pytest.raises(ValueError, match="6 blocks on the device and 5 on the host"):
            pool.copy([BlockCopy("copy", 0, 1), bad])
    assert contents(pool) == before
    pool.copy([])


def test_fill_spares_the_block_of_zeros() -> None:
    pool = numbered()
    pool.fill(math.nan)
    for kv in pool.layers:
        assert kv.zero_block == 6
        for tensor in (kv.key, kv.value):
            assert tensor[:, :24].isnan().all()
            assert (tensor[:, 24:] == 0).all()
    assert all(host.isnan().all() for host in pool._host)


def test_memory_is_not_touched() -> None:
    """A pool of many gigabytes costs next to nothing before it is written, where the system commits memory late."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc")

    def resident() -> int:
        return int(status.read_text().split("VmRSS:")[1].split()[0]) * 1024

    each = sum(block_bytes([layer()], 16).values())
    before = resident()
    try:
        pool = KVPool([layer()], num_blocks=(3 << 30) // each, block_size=16, host_blocks=(1 << 30) // each)
    except OutOfKVMemory:
        pytest.skip("address space is limited")
    assert resident() - before < 200 << 20
    assert pool.layers[0].key.numel() > 1 << 28


def test_too_much_memory_is_refused_with_numbers() -> None:
    each = sum(block_bytes([layer()], 16).values())
    many = (1 << 60) // each
    with pytest.raises(OutOfKVMemory, match=f"{many + 1:,} KV blocks of {each:,} bytes"):
        KVPool([layer()], num_blocks=many, block_size=16)
    with pytest.raises(OutOfKVMemory, match=f"{many:,} host blocks of {each:,} bytes"):
        KVPool([layer()], num_blocks=1, block_size=16, host_blocks=many)
