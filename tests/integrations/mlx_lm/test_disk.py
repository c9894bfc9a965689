"""What is kept on a disk: found again, bounded, and never wrong, whatever happened to the folder."""

import errno
import os
import random
import shutil
from array import array
from hashlib import sha256
from struct import pack

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from integrations.mlx_lm.driver import decode, forward
from integrations.mlx_lm.models import CONFIGS, make_model
from kvblocks import BlockIdentity, InvalidArgumentError
from kvblocks.integrations.mlx_lm import BlockPromptCache, DiskOptions
from kvblocks.integrations.mlx_lm.disk import StoredPiece, _packed, _unpack

CLOSE = 1e-5
BYTES = 60 << 20


def make(folder, model, **options):
    return BlockPromptCache(model, block_size=8, disk=DiskOptions(folder, BYTES, b"weights", **options))


def fill(cache, model, number=3, length=90):
    """Insert some prompts that share a beginning; return them with their answers."""
    source = random.Random(5)
    start = [source.randrange(6, 100) for _ in range(length // 2)]
    prompts = []
    for _ in range(number):
        tokens = start + [source.randrange(6, 100) for _ in range(length // 2)]
        found, rest = cache.fetch_nearest_cache("m", tokens)
        found = make_prompt_cache(model) if found is None else found
        logits = forward(model, found, rest)
        tokens = tokens + decode(model, found, logits[-1], 5)
        cache.insert_cache("m", tokens, found)
        prompts.append(tokens)
    return prompts


def num_found(cache, model, tokens):
    """How many tokens of a longer prompt are found; and that going on from there is right."""
    longer = [*tokens, 7, 8, 9]
    found, rest = cache.fetch_nearest_cache("m", longer)
    cache.check()
    if found is None:
        return 0
    logits = forward(model, found, rest)
    expected = forward(model, make_prompt_cache(model), longer)[-len(rest) :]
    assert float(mx.abs(logits - expected).max()) <= CLOSE
    return len(longer) - len(rest)


@pytest.mark.parametrize("name", CONFIGS)
def test_another_process_finds_it(name, tmp_path):
    model = make_model(name)
    first = make(tmp_path, model)
    prompts = fill(first, model)
    first.close()
    second = make(tmp_path, model)
    for tokens in prompts:
        assert num_found(second, model, tokens) >= len(tokens) // 8 * 8
    assert num_found(second, model, prompts[0]) >= len(prompts[0]) // 8 * 8  # from memory now
    second.insert_cache("m", *goes_on(second, model, prompts[0]))
    second.close()
    shutil.rmtree(tmp_path)
    assert num_found(make(tmp_path, model), model, prompts[0]) == 0


def goes_on(cache, model, tokens):
    longer = [*tokens, *range(40, 60)]
    found, rest = cache.fetch_nearest_cache("m", longer)
    forward(model, found, rest)
    return longer, found


def test_other_weights_find_nothing_and_the_old_ones_find_theirs_again(tmp_path):
    model, other = make_model("llama"), make_model("llama", seed=1)
    first = make(tmp_path, model)
    tokens = fill(first, model)[0]
    first.close()
    changed = BlockPromptCache(other, block_size=8, disk=DiskOptions(tmp_path, BYTES, b"other weights"))
    assert num_found(changed, other, tokens) == 0
    changed.close()
    secret = make(tmp_path, model, secret=b"0123456789abcdef")
    fill(secret, model, number=1)
    secret.close()
    assert num_found(make(tmp_path, model, secret=b"0123456789abcdeg"), model, tokens) == 0


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2"])
def test_a_damaged_folder_gives_misses(name, tmp_path):
    model, source = make_model(name), random.Random(2)
    first = make(tmp_path, model)
    prompts = fill(first, model)
    first.close()
    for trial in range(6):
        folder = tmp_path / f"copy{trial}"
        shutil.copytree(tmp_path, folder, ignore=shutil.ignore_patterns("copy*"))
        files = [file for file in folder.rglob("*") if file.is_file() and file.stat().st_size]
        for file in files if trial % 2 else [source.choice(files)]:
            raw = bytearray(file.read_bytes())
            for _ in range(1 + len(raw) // 2000):
                raw[source.randrange(len(raw))] ^= 1 << source.randrange(8)
            file.write_bytes(raw[: len(raw) // 2] if trial == 3 else raw)
        cache = make(folder, model)
        for tokens in prompts:
            num_found(cache, model, tokens)
        cache.close()


def test_the_folder_stays_within_its_bound(tmp_path):
    model = make_model("qwen3_next")
    options = DiskOptions(tmp_path, 6 << 20, b"weights")
    cache = BlockPromptCache(model, block_size=8, disk=options)
    for turn in range(4):
        fill(cache, model, number=2, length=60 + 30 * turn)
        cache.clear()
    cache.close()
    assert sum([file.stat().st_size for file in tmp_path.rglob("*")]) <= (6 << 20) + 4096 * 3
    again = BlockPromptCache(model, block_size=8, disk=options)
    prompts = fill(again, model, number=1, length=150)
    again.close()
    last = BlockPromptCache(model, block_size=8, disk=options)
    assert num_found(last, model, prompts[0]) == len(prompts[0])


def test_what_is_evicted_from_memory_is_read_again(tmp_path):
    model = make_model("llama")
    cache = BlockPromptCache(model, block_size=8, max_bytes=40_000, disk=DiskOptions(tmp_path, BYTES, b"weights"))
    prompts = fill(cache, model, number=4)
    assert all(num_found(cache, model, tokens) > 40 for tokens in prompts)
    assert cache.nbytes <= 40_000


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
@pytest.mark.parametrize("num_written", [0, 1, 3])
def test_what_a_full_disk_refused_is_stored_later(name, num_written, tmp_path, monkeypatch):
    model = make_model(name)
    cache = make(tmp_path, model)
    real, written = os.pwritev, iter(range(num_written))

    def full(*given):
        if next(written, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        tokens = fill(cache, model, number=1)[0]
        assert all(job.result() for job in cache._disk._jobs)  # noqa: SLF001
    cache.clear()
    fill(cache, model, number=1)
    cache.close()
    assert num_found(make(tmp_path, model), model, tokens) >= len(tokens) // 8 * 8


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_block_that_is_damaged_is_stored_again(name, tmp_path):
    model = make_model(name)
    first = make(tmp_path, model)
    tokens = fill(first, model, number=1)[0]
    first.close()
    arena = tmp_path / "store" / "kvblocks.arena"
    arena.write_bytes(bytes(4096) + arena.read_bytes()[4096:])
    second = make(tmp_path, model)
    assert num_found(second, model, tokens) == 0
    fill(second, model, number=1)
    second.close()
    assert num_found(make(tmp_path, model), model, tokens) >= len(tokens) // 8 * 8


def test_pieces_that_left_the_disk_are_forgotten(tmp_path):
    model, source = make_model("qwen3_next"), random.Random(3)
    cache = BlockPromptCache(model, block_size=8, disk=DiskOptions(tmp_path, 4 << 20, b"weights"))
    for _ in range(70):
        tokens = [source.randrange(6, 100) for _ in range(6)]
        found = make_prompt_cache(model)
        forward(model, found, tokens)
        cache.insert_cache("m", tokens, found)
    disk = cache._disk  # noqa: SLF001
    num_chunks = sum([total for tails in disk._tails.values() for total in tails.values()])  # noqa: SLF001
    assert num_chunks <= disk._store.num_slots == len(disk._slots)  # noqa: SLF001
    cache.close()


def test_chunks_that_were_written_at_different_times_are_no_piece():
    tail = bytes(12)
    pieces = [StoredPiece(3, [], {}, [([mx.full((700,), value)], ())]) for value in (1, 2)]
    one, other = [_packed(piece, tail) for piece in pieces]
    assert mx.array_equal(_unpack(one, tail, 3).states[0][0][0], mx.full((700,), 1))
    assert len(one) == len(other) and _unpack(one[:1024] + other[1024:], tail, 3) is None
    assert _unpack(one[:-1], tail, 3) is None and _unpack(one + bytes(9), tail, 3) is not None


def test_rows_that_no_cache_wrote_are_misses(tmp_path):
    """The index isn't verified: bits may flip, and others may write."""
    model = make_model("qwen3_next")
    first = make(tmp_path, model)
    tokens = fill(first, model, number=1)[0]
    first.close()
    second = make(tmp_path, model)
    assert num_found(second, model, tokens) > 0
    store = second._disk._store  # noqa: SLF001
    above, zeros = next(second._disk.identities(array("I", tokens), 1)).digest(), bytes(32)  # noqa: SLF001
    keys = [b"piece", b"piece" + pack("<III", 1, 0, 2**32 - 1) + bytes(32), b"letter" + bytes(43), b"x" * 500]
    places = range(store.num_slots - len(keys), store.num_slots)
    identities = [BlockIdentity(above, key, zeros) for key in keys]
    store.write(places, identities, bytes(len(keys) * second._disk._slot_bytes))  # noqa: SLF001
    store.remember(dict(zip(places, identities, strict=True)))
    second.close()
    assert num_found(make(tmp_path, model), model, tokens) > 0


def test_a_layout_of_other_versions_is_not_read(tmp_path):
    model = make_model("llama")
    first = make(tmp_path, model)
    tokens = fill(first, model, number=1)[0]
    first.close()
    path = tmp_path / "layout.txt"
    name, _, text = path.read_text().split("\n")
    for other in (text.replace("KVCache", "OlderCache"), text.replace("float32", "float33"), "5", "(None,), [5]"):
        path.write_text("\n".join([name, sha256(other.encode()).hexdigest(), other]))
        assert num_found(make(tmp_path, model), model, tokens) == 0


def test_a_model_whose_files_are_gone_is_not_kept(tmp_path, caplog):
    model = make_model("llama")
    (tmp_path / "config.json").symlink_to(tmp_path / "nowhere")
    cache = BlockPromptCache(model, block_size=8, disk=DiskOptions(tmp_path / "kv", BYTES))
    assert cache.fetch_nearest_cache(str(tmp_path), [*range(20)])[0] is None
    assert "names no files of a model that can be read" in caplog.text


def test_a_folder_that_cannot_be_used_is_said(tmp_path, caplog):
    model = make_model("llama")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "letter.txt").write_text("not ours")
    cache = make(tmp_path, model)
    tokens = fill(cache, model, number=1)[0]
    assert "nothing is kept on the disk" in caplog.text
    assert num_found(cache, model, tokens) == len(tokens)  # from memory
    assert (tmp_path / "store" / "letter.txt").read_text() == "not ours"
    with pytest.raises(InvalidArgumentError, match="max_bytes"):
        BlockPromptCache(disk=DiskOptions(tmp_path, 0))
    nameless = BlockPromptCache(model, block_size=8, disk=DiskOptions(tmp_path / "other", BYTES))
    fill(nameless, model, number=1)
    assert "names no files of a model" in caplog.text


def test_objects_that_are_kept_whole_stay_in_memory(tmp_path, caplog):
    cache = make(tmp_path, None)
    tokens = [*range(30)]
    for number in (10, 30):
        cache.insert_cache("m", tokens[:number], [ArraysCacheBelow(number)])
    assert cache.fetch_nearest_cache("m", [*tokens, 7])[1] == [7]
    cache.close()
    told = [record.message for record in caplog.records]
    assert len(told) == 1 and told[0].startswith("not on the disk: ") and "ArraysCacheBelow" in told[0]
    assert not [*tmp_path.iterdir()]
    assert make(tmp_path, None).fetch_nearest_cache("m", tokens) == (None, tokens)


class ArraysCacheBelow(ArraysCache):
    """A class below a known one is unknown."""

    def __init__(self, number):
        super().__init__(1)
        self[0] = mx.arange(number)
