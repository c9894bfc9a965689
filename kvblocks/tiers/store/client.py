"""`ValkeyClient`: commands to a Valkey or Redis, a single server or a cluster, with a time limit for each batch.

The only module that imports `valkey`. Each command has one key, so any node of a cluster may have it. A batch is split
by node, and over several connections. Each part is one pipeline on a thread of a pool, and the caller waits for all
parts until a deadline. Unanswered parts count as lost, and their connections are closed. So a server that hangs or
sends slowly keeps no thread, and no late answer is taken for that of another command.

valkey's own cluster pipeline isn't used: when a node is gone, it asks for the cluster's layout for each command again,
and it waits for one node after another.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from contextlib import suppress
from typing import Any, Protocol

from kvblocks.errors import InvalidArgumentError
from kvblocks.tiers.store.address import StoreAddress
from kvblocks.tiers.store.errors import StoreError, StoreRefusedError

Command = tuple[Any, ...]
"""A command's name, its key, and what follows."""

CONNECT_S = 0.5
LEAST_PART = 8
"""A connection gets at least so many commands before another one gets any."""

LAYOUT_PAUSE_S = 1.0
"""The cluster is asked for its layout at most once in so many seconds."""

_NUM_SCANNED = 1000
_ONCE = frozenset({"ZPOPMIN"})  # not repeated, because the second one would take further entries


class Client(Protocol):
    """What `SharedStore` needs of a client. No call takes much longer than `timeout_s`."""

    def run(self, commands: Sequence[Command], timeout_s: float) -> list[Any]:
        """Return the answers in order. If an answer didn't come or is a refusal, a StoreError stands in its place.

        Raises StoreError if no answer came, or not all came in time.
        """

    def ping(self, timeout_s: float) -> None:
        """Return when the store answers. Raises StoreError."""

    def delete_matching(self, pattern: str, timeout_s: float) -> int:
        """Delete all matching keys on all nodes, and return how many. Raises StoreError if some remain."""

    def drop_connections(self) -> None:
        """Close all connections, since their answers can't be trusted, and begin with new ones."""

    def close(self) -> None:
        """Close the client without waiting for anything."""


def open_clients(address: StoreAddress) -> tuple[Client, Client, Client]:
    """Return clients for lookups, loads and stores, so that none of these waits for another. Opens no connection.

    Raises InvalidArgumentError without the package.
    """
    one = ValkeyClient(address, 1)
    return one, ValkeyClient(address, address.connections), ValkeyClient(address, address.connections)


class ValkeyClient:
    """See the module. Call it from one thread. It connects at its first use.

    Raises InvalidArgumentError if the package isn't installed, or its certificate file can't be read.
    """

    def __init__(self, address: StoreAddress, num_connections: int) -> None:
        try:
            import valkey
            import valkey.cluster
        except ImportError:
            raise InvalidArgumentError(
                "store: expected the package 'valkey', got none: pip install 'kvblocks[valkey]'"
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

    def delete_matching(self, pattern: str, timeout_s: float) -> int:
        """As `Client`. O(all keys of the store)."""
        end_s = time.monotonic() + timeout_s
        number = 0
        for node in self._wait(self._submit(self._nodes), end_s):
            cursor = b"0"
            while True:
                scan = [("SCAN", cursor, "MATCH", pattern, "COUNT", _NUM_SCANNED)]
                (answer,) = self._wait(self._submit(self._run_part, node, scan, end_s), end_s)
                try:
                    cursor, keys = _checked(answer)
                    is_last = int(cursor) == 0
                except (TypeError, ValueError):
                    raise StoreError(f"{self._address}: expected a cursor and keys, got a damaged answer") from None
                unlink = [("UNLINK", key) for key in keys]
                if unlink:
                    deleted = self._wait(self._submit(self._run_part, node, unlink, end_s), end_s)
                    number += sum([_checked(one) for one in deleted])
                if is_last:
                    break
        return number

    def drop_connections(self) -> None:
        """As `Client`. Also ends calls that threads of the pool wait in."""
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
        """Return the cluster. Asks for its layout at first, and again when it may have changed. May wait."""
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
                    node = cluster.get_node_from_key(command[1])
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
        connection. Commands that must not be done twice are not run again.
        """
        package = self._package
        if node is None and self._single is None:
            raise StoreError(f"{self._address}: expected a node for each slot, got slots without")
        may_repeat = not any(command[0] in _ONCE for command in commands)
        try:
            try:
                answers = self._run_once(node, commands)
            except package.ConnectionError:
                if not may_repeat or time.monotonic() >= end_s:
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
    """Return an error's text, without what a command holds."""
    return f"{type(error).__name__}: {str(error)[:200]}"
