"""`ValkeyClient`: commands to a Valkey or Redis, a single server or a cluster, with a time limit for each batch.

This is the only module that imports `valkey`. Each command has one key, or keys in one slot of a cluster. A batch is
split by node, and over several connections. Each part is one pipeline on a thread of a pool, and the caller waits for
all parts until a deadline. Unanswered parts count as lost, and their connections are closed. So a server that hangs or
sends slowly keeps no thread, and no late answer is taken for that of another command.

valkey's own cluster pipeline isn't used: when a node is gone, it asks for the cluster's layout for each command again,
and it waits for one node after another.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from contextlib import suppress
from itertools import chain
from typing import Any, Protocol

from kvblocks.arguments import pip_install
from kvblocks.errors import InvalidArgumentError, KVBlocksError
from kvblocks.tiers.store.address import StoreAddress

Command = tuple[Any, ...]
"""A command's name, its key, and its arguments. Or EVAL, a script, the number of its keys, these, and the arguments."""

CONNECT_S = 0.5
LEAST_PART = 8
"""A connection gets at least this many commands before another one gets any."""

LAYOUT_PAUSE_S = 1.0
"""The cluster is asked for its layout at most once in this many seconds."""

_NUM_SCANNED = 1000


class StoreError(KVBlocksError):
    """A store can't be reached, or didn't answer in time. The message says expected and got."""


class StoreRefusedError(StoreError):
    """A store answered with a refusal: it is full or read-only, or this user may not run the command."""


class Client(Protocol):
    """What `SharedStore` needs of a client. No call takes much longer than `timeout_s`.

    A command may be carried out twice, if the connection was lost before its answer came.
    """

    def run(self, commands: Sequence[Command], timeout_s: float) -> list[Any]:
        """Return the answers in order, with a StoreError in place of an answer that didn't come or is a refusal.

        Raises StoreError if no answer came, or not all came in time.
        """

    def ping(self, timeout_s: float) -> None:
        """Return when the store answers. Raises StoreError."""

    def keys_matching(self, pattern: str, timeout_s: float) -> list[bytes]:
        """Return all matching keys on the nodes that answer. Raises StoreError if none does."""

    def delete_matching(self, patterns: Sequence[str], timeout_s: float) -> int:
        """Delete all matching keys on all nodes, pattern by pattern on each node, and return how many.

        Raises StoreError if some remain. The message says where, and how many were deleted.
        """

    def drop_connections(self) -> None:
        """Close all connections, since their answers can't be trusted, and begin with new ones."""

    def close(self) -> None:
        """Close the client without waiting for anything."""


def open_clients(address: StoreAddress) -> tuple[Client, Client, Client]:
    """Return clients for lookups, loads and stores, so that none of these waits for another. Opens no connection.

    Raises InvalidArgumentError if the package isn't installed.
    """
    one = ValkeyClient(address, 1)
    return one, ValkeyClient(address, address.connections), ValkeyClient(address, address.connections)


class ValkeyClient:
    """The client that this module describes. It connects on first use, and must be called from one thread.

    Raises InvalidArgumentError if the package isn't installed, or its certificate file can't be read.
    """

    def __init__(self, address: StoreAddress, num_connections: int) -> None:
        try:
            import valkey
            import valkey.cluster
        except ImportError:
            raise InvalidArgumentError(
                f"store: expected the package 'valkey', got none: {pip_install('valkey')}"
            ) from None
        self._package: Any = valkey
        self._address = address
        self._num_connections = num_connections
        self._threads = ThreadPoolExecutor(num_connections * (4 if address.is_cluster else 1) + 1, "kvblocks-store")
        self._cluster: Any = None  # Any, since some of its calls have no types
        self._single: Any = None if address.is_cluster else self._connect_one(*address.nodes[0])
        self._opening = threading.Lock()
        self._is_stale = False  # whether the known layout of the cluster may be old
        self._looked_at = 0.0

    # Methods of `Client`.

    def run(self, commands: Sequence[Command], timeout_s: float) -> list[Any]:
        """As `Client`."""
        end_s = time.monotonic() + timeout_s
        answers: list[Any] = [None] * len(commands)
        parts = self._parts(commands, end_s)
        begun = [
            (numbers, self._submit(self._run_part, node, [commands[number] for number in numbers], end_s))
            for node, numbers in parts
        ]
        lost: StoreError | None = None
        num_lost = 0
        for numbers, future in begun:
            try:
                found = self._wait(future, end_s)
            except StoreError as error:
                found, lost = [error] * len(numbers), error
                num_lost += len(numbers)
            for number, answer in zip(numbers, found, strict=True):
                answers[number] = answer
        if lost is not None:
            self._is_stale = True
            if num_lost == len(commands) or time.monotonic() >= end_s:
                raise lost
        return answers

    def ping(self, timeout_s: float) -> None:
        """As `Client`. In a cluster, one node that answers is enough."""
        end_s = time.monotonic() + timeout_s
        failure: StoreError | None = None
        for node in self._wait(self._submit(self._nodes), end_s):
            try:
                self._wait(self._submit(self._run_part, node, [("PING",)], end_s), end_s)
            except StoreError as error:
                failure = error
            else:
                return
        raise failure or StoreError(f"{self._address}: expected a node, got none")

    def keys_matching(self, pattern: str, timeout_s: float) -> list[bytes]:
        """As `Client`. O(all keys of the store)."""
        end_s, found = time.monotonic() + timeout_s, list[bytes]()
        num_done, failures = self._on_each_node(
            end_s, lambda node: found.extend(chain(*self._scan(node, pattern, end_s)))
        )
        if failures and not num_done:
            raise failures[-1][1]
        return found

    def delete_matching(self, patterns: Sequence[str], timeout_s: float) -> int:
        """As `Client`. O(all keys of the store) for each pattern."""
        end_s, number = time.monotonic() + timeout_s, 0

        def delete(node: Any) -> None:
            nonlocal number
            for keys in chain.from_iterable(self._scan(node, pattern, end_s) for pattern in patterns):
                if keys:
                    unlink: list[Command] = [("UNLINK", key) for key in keys]
                    number += sum([_checked(one) == 1 for one in self._run_soon(node, unlink, end_s)])

        _, failures = self._on_each_node(end_s, delete)
        if failures:
            where = ", ".join(name for name, _ in failures)
            kind = StoreError if any(type(error) is StoreError for _, error in failures) else StoreRefusedError
            raise kind(
                f"expected all keys to be deleted, got {number} deleted, and some left on {where}: {failures[0][1]}"
            )
        return number

    def drop_connections(self) -> None:
        """As `Client`. Also ends the calls that threads of the pool are waiting for."""
        with suppress(Exception):  # those threads may have closed some already
            if self._single is not None:
                self._single.connection_pool.disconnect()
            elif self._cluster is not None:
                for node in self._cluster.get_nodes():
                    if node.valkey_connection is not None:
                        node.valkey_connection.connection_pool.disconnect()

    def close(self) -> None:
        """As `Client`."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.drop_connections()

    # Nodes, one after another.

    def _on_each_node(self, end_s: float, function: Callable[[Any], None]) -> tuple[int, list[tuple[str, StoreError]]]:
        """Call a function for each node that may have keys. Return on how many it succeeded, and the failure of each
        other node.

        Raises StoreError if the nodes aren't known.
        """
        nodes = self._wait(self._submit(self._nodes), self._soon(end_s))
        failures: list[tuple[str, StoreError]] = []
        for node in nodes:
            try:
                function(node)
            except StoreError as error:
                self._is_stale = True
                failures.append((str(self._address) if node is None else node.name, error))
        return len(nodes) - len(failures), failures

    def _scan(self, node: Any, pattern: str, end_s: float) -> Iterator[list[bytes]]:
        """Yield the keys of a node that match, in parts. A key that exists the whole time is in at least one."""
        cursor = b"0"
        while True:
            scan: list[Command] = [("SCAN", cursor, "MATCH", pattern, "COUNT", _NUM_SCANNED)]
            (answer,) = self._run_soon(node, scan, end_s)
            try:
                cursor, keys = _checked(answer)
                is_last = int(cursor) == 0
            except (TypeError, ValueError):
                raise StoreError(f"{self._address}: expected a cursor and keys, got a damaged answer") from None
            yield keys
            if is_last:
                return

    def _run_soon(self, node: Any, commands: Sequence[Command], end_s: float) -> list[Any]:
        """Run commands on one node, within `timeout_s` of the address, so that a store that hangs is noticed."""
        soon_s = self._soon(end_s)
        found: list[Any] = self._wait(self._submit(self._run_part, node, commands, soon_s), soon_s)
        return found

    def _soon(self, end_s: float) -> float:
        return min(end_s, time.monotonic() + self._address.timeout_s)

    # Connections.

    def _options(self) -> dict[str, Any]:
        address, package = self._address, self._package
        options: dict[str, Any] = {
            "username": address.username,
            "password": address.password,
            "socket_timeout": address.timeout_s,
            "socket_connect_timeout": min(CONNECT_S, address.timeout_s),
            "socket_keepalive": True,
            "retry": package.retry.Retry(package.backoff.NoBackoff(), 0),  # they know no deadline: `_run_part` retries
        }
        if address.is_tls:
            options |= {"ssl": True, "ssl_check_hostname": True, "ssl_ca_certs": address.ca_file}
        return options

    def _connect_one(self, host: str, port: int) -> Any:
        return self._package.Valkey(host=host, port=port, db=self._address.db, **self._options())

    def _open_cluster(self) -> Any:
        """Return the cluster. Asks for its layout the first time, and again when it may have changed. May wait."""
        with self._opening:
            now_s = time.monotonic()
            if self._cluster is None:
                cluster = self._package.cluster
                nodes = [cluster.ClusterNode(host, port) for host, port in self._address.nodes]
                self._cluster = cluster.ValkeyCluster(startup_nodes=nodes, **self._options())
                self._looked_at = now_s
            elif self._is_stale and now_s - self._looked_at > LAYOUT_PAUSE_S:
                self._looked_at = now_s
                self._is_stale = False
                with suppress(self._package.ValkeyError):  # the old layout is better than none
                    self._cluster.nodes_manager.initialize()
            return self._cluster

    def _nodes(self) -> list[Any]:
        """Return all nodes that may have keys. May wait."""
        return [None] if self._single is not None else list(self._open_cluster().get_primaries())

    def _parts(self, commands: Sequence[Command], end_s: float) -> list[tuple[Any, list[int]]]:
        """Return which commands go together, as their node and their numbers."""
        by_node: dict[str, tuple[Any, list[int]]] = {}
        if self._single is not None:
            by_node[""] = (None, list(range(len(commands))))
        else:
            cluster = self._wait(self._submit(self._open_cluster), end_s)
            for number, command in enumerate(commands):
                try:
                    node = cluster.get_node_from_key(command[3 if command[0] == "EVAL" else 1])
                except self._package.ValkeyError:  # no node has the key's slot
                    node = None
                by_node.setdefault("" if node is None else node.name, (node, []))[1].append(number)
        parts: list[tuple[Any, list[int]]] = []
        for node, numbers in by_node.values():
            size = max(LEAST_PART, -(-len(numbers) // self._num_connections))
            parts += [(node, numbers[start : start + size]) for start in range(0, len(numbers), size)]
        return parts

    def _run_part(self, node: Any, commands: Sequence[Command], end_s: float) -> list[Any]:
        """Run commands as one pipeline, on a thread of the pool. Raises StoreError.

        If the connection is lost before `end_s`, they are run once more at once: the server may have closed an idle
        connection.
        """
        package = self._package
        if node is None and self._single is None:
            raise StoreError(f"{self._address}: expected a node for each slot, got slots without")
        try:
            try:
                answers = self._run_once(node, commands)
            except package.ConnectionError:
                if time.monotonic() >= end_s:
                    raise
                answers = self._run_once(node, commands)
        except Exception as error:  # a damaged answer or a closed connection may raise any exception in the parser
            raise StoreError(f"{self._address}: expected an answer, got {_words(error)}") from error
        for number, answer in enumerate(answers):
            if isinstance(answer, Exception):
                if isinstance(answer, package.exceptions.MovedError | package.exceptions.ClusterDownError):
                    self._is_stale = True
                if isinstance(answer, package.ReadOnlyError) and self._single is not None:
                    self.drop_connections()  # the primary has changed: its name may lead to another node now
                answers[number] = StoreRefusedError(f"{self._address}: {_words(answer)}")
        return answers

    def _run_once(self, node: Any, commands: Sequence[Command]) -> list[Any]:
        client = self._single if self._single is not None else self._open_cluster().get_valkey_connection(node)
        with client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            answers: list[Any] = pipeline.execute(raise_on_error=False)
        return answers

    # Waiting.

    def _submit(self, function: Callable[..., Any], *given: Any) -> "Future[Any]":
        try:
            return self._threads.submit(function, *given)
        except RuntimeError as error:  # the pool was closed
            raise StoreError(f"{self._address}: expected an open client, got {error}") from None

    def _wait(self, future: "Future[Any]", end_s: float) -> Any:
        """Return what a thread found. Raises StoreError, also when it isn't done by `end_s`."""
        try:
            return future.result(max(0.0, end_s - time.monotonic()))
        except LateError:
            future.cancel()
            self.drop_connections()
            raise StoreError(f"{self._address}: expected an answer in time, got none") from None
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"{self._address}: expected an answer, got {_words(error)}") from error


def _checked(answer: Any) -> Any:
    """Return an answer; raise it if it is an error."""
    if isinstance(answer, StoreError):
        raise answer
    return answer


def _words(error: BaseException) -> str:
    """Return an error's text, without anything from a command."""
    return f"{type(error).__name__}: {str(error)[:200]}"
