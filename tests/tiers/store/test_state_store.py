"""Checkpoints in a store that servers share, on a real Valkey: a state moves as a whole, or isn't found."""

from typing import Any

from states.test_state_tiers import BYTES, LATER, PROMPT, compute, make, page, spill
from tiers.store.servers import running

from kvblocks import Sequence, Tier
from kvblocks.tiers.restoring import known_prefix
from kvblocks.tiers.sealing import Sealer
from kvblocks.tiers.store import SharedStore, parse_address
from kvblocks.tiers.store.client import open_clients
from kvblocks.tiers.store.store import Owner


def test_servers_share_states_in_a_store_and_none_counts_on_a_part(tmp_path: Any) -> None:
    tier = Tier("store", 100, BYTES, is_shared=True)
    with running(tmp_path) as server:
        address = parse_address(server.url + "?timeout_ms=20000&lookup_ms=20000")
        store = SharedStore(address, Sealer(bytes(32), None), open_clients(address))
        one = make(tier)
        one.free(compute(one, Sequence("first", PROMPT)))
        while found := one.tiers.take_transfers():
            for transfer in found:
                identities = transfer.identities()
                assert store.write(Owner(None), identities, [*map(page, identities)])
                one.tiers.complete(transfer, ok=True)
        other = make(tier)
        sequence = Sequence("later", LATER)

        def ask() -> list[Any]:
            """Ask the store for all blocks of the sequence and the three parts at each, as an engine does."""
            known = known_prefix(sequence, 4)
            blocks = [identity.digest() for identity in known.identities(0, 10, 4)]
            asked = [(index, column) for index in range(10) for column in (1, 2, 3)]
            parts = [type(found_identity)(blocks[index], b"", b"", column).digest() for index, column in asked]
            there = store.find([(None, blocks + parts)])[0]
            number = there[:10].index(False) if False in there[:10] else 10
            attached = [pair for pair, is_there in zip(asked, there[10:], strict=True) if is_there]
            assert other.tiers.note_found("store", sequence, number, attached) == number
            return other.tiers.find(other.get_computed_blocks(sequence))

        found_identity = identities[0]
        (load,) = ask()
        assert (load.num_tokens, load.num_bytes) == (36, 12 * BYTES)
        other.tiers.allocate(sequence, other.get_computed_blocks(sequence), [load])
        (transfer,) = other.tiers.take_transfers()
        values = store.read(None, transfer.identities(), 12 * BYTES)
        assert [None if value is None else bytes(value) for value in values] == [*map(page, transfer.identities())]
        other.tiers.complete(transfer, ok=True)
        assert other.states.take_copies()[0][0].position == 36
        other.free(sequence)
        spill(other)
        assert server.client().delete(f"{_name_of(store, transfer.identities()[-2])}") == 1
        sequence = Sequence("again", LATER)
        assert ask() == [], "the store has evicted a part of the state"
        other.check()
        store.close()


def _name_of(store: SharedStore, identity: Any) -> str:
    names = store._names  # noqa: SLF001
    return names.block(names.tenant(None), identity.digest())
