"""The interface of a prefix cache."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class BaseCacheHandle(ABC):
    cached_len: int

    @abstractmethod
    def get_matched_indices(self): ...


class SizeInfo(NamedTuple):
    evictable_size: int
    protected_size: int

    @property
    def total_size(self):
        return self.evictable_size + self.protected_size


class InsertResult(NamedTuple):
    cached_len: int
    handle: Any


class MatchResult(NamedTuple):
    cuda_handle: Any


class BasePrefixCache(ABC):
    @abstractmethod
    def lock_handle(self, handle, unlock=False): ...

    @abstractmethod
    def match_prefix(self, input_ids): ...

    @abstractmethod
    def insert_prefix(self, input_ids, indices): ...

    @abstractmethod
    def evict(self, size): ...

    @abstractmethod
    def reset(self): ...

    @property
    @abstractmethod
    def size_info(self): ...

    @abstractmethod
    def check_integrity(self): ...
