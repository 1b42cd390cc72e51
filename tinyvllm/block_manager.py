"""BlockManager: which KV block belongs to whom, and which full blocks can be shared.

A block is in exactly one of three states:

    free ──allocate──► referenced (ref_count >= 1) ──last reference gone──► free
      ▲                     ▲                                           └─► cached, unreferenced
      └──── evicted (LRU) ──┴───────── prefix hit ───────────────────────────────┘

Only full blocks whose KV has been computed are in the prefix cache, and a full block is never
written again: so no one writes to a block that somebody else may read.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING

from tinyvllm.sequence import SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as SequenceOf

    from tinyvllm.sequence import Sequence


class BlockManager:
    """`num_blocks` blocks of `block_size` tokens each. Not thread-safe: engine thread only."""

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        assert num_blocks >= 1, num_blocks
        assert block_size >= 1, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_cache_queries = 0
        """Tokens looked up by sequences at their first admission."""
        self.prefix_cache_hits = 0
        """Tokens of those that were found."""
        self.num_shared_blocks = 0
        """Blocks that more than one sequence has."""
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 goes out first
        self._unreferenced: OrderedDict[int, None] = OrderedDict()  # cached; oldest first
        self._block_of_hash: dict[bytes, int] = {}
        self._hash_of_block: list[bytes | None] = [None] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, evicting unreferenced cached ones if need be."""
        return len(self._free) + len(self._unreferenced)

    @property
    def num_cached_blocks(self) -> int:
        """Those of the free blocks that are kept for the prefix they hold."""
        return len(self._unreferenced)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, seq: Sequence) -> list[int]:
        """The computed blocks that `seq` can start with, from the prefix cache or from the sequence
        that it is a fork of; at least one token is left to compute."""
        hits: list[int] = []
        if not (self.enable_prefix_caching and seq.reads_prefix_cache):
            return self._match_parent(seq)
        num_blocks = (len(seq.token_ids) - 1) // self.block_size
        block_of_hash = self._block_of_hash
        hashes = seq.block_hashes
        for i in range(num_blocks):
            block_id = block_of_hash.get(hashes[i] if i < len(hashes) else self._hash(seq, i))
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def can_allocate(
        self,
        num_blocks: int,
        hits: SequenceOf[int] = (),
        released: Iterable[list[int]] = (),
    ) -> bool:
        """Whether a table of `num_blocks` blocks that starts with `hits` can be had, were the
        tables in `released` freed first."""
        ref_counts = self._ref_counts
        num_free = self.num_free_blocks
        uses = Counter(chain.from_iterable(released))
        num_free += sum(ref_counts[block_id] == n for block_id, n in uses.items())
        # Hits that stay referenced cost nothing; the others come out of the free ones.
        num_shared = sum(ref_counts[block_id] > uses[block_id] for block_id in hits)
        return num_free + num_shared >= num_blocks

    def allocate(self, seq: Sequence, hits: list[int]) -> None:
        """Gives `seq` blocks for all its known tokens, the first ones being `hits`.

        `hits` is `match_prefix`'s answer, with nothing allocated since; `can_allocate` said yes.
        """
        assert not seq.block_table, seq
        for block_id in hits:  # before any eviction, so that none of them can be its victim
            if self._ref_counts[block_id] == 0:
                del self._unreferenced[block_id]
            self._ref_counts[block_id] += 1
            self.num_shared_blocks += self._ref_counts[block_id] == 2
        num_blocks = self.num_blocks_for(len(seq.token_ids))
        seq.block_table = hits + [self._take() for _ in range(num_blocks - len(hits))]
        seq.capacity = num_blocks * self.block_size
        seq.num_computed_tokens = seq.num_scheduled_tokens = len(hits) * self.block_size
        if seq.num_preemptions == 0:  # later hits are mostly on the sequence's own blocks
            seq.num_cached_tokens = seq.num_computed_tokens
            if self.enable_prefix_caching and seq.reads_prefix_cache:
                self.prefix_cache_queries += len(seq.token_ids)
                self.prefix_cache_hits += seq.num_computed_tokens

    def append(self, seq: Sequence) -> bool:
        """One more block for `seq`; False when there is none."""
        if not (self._free or self._unreferenced):
            return False
        seq.block_table.append(self._take())
        seq.capacity += self.block_size
        return True

    def commit(self, seq: Sequence, num_computed_before: int) -> None:
        """Puts the blocks that filled up since `num_computed_before` into the prefix cache."""
        if not (self.enable_prefix_caching and seq.writes_prefix_cache):
            return
        block_size = self.block_size
        hashes = seq.block_hashes
        for i in range(num_computed_before // block_size, seq.num_computed_tokens // block_size):
            digest = hashes[i] if i < len(hashes) else self._hash(seq, i)
            # Computed twice by sequences that ran side by side: the first copy stays the shared
            # one, ours remains private.
            if digest not in self._block_of_hash:
                block_id = seq.block_table[i]
                self._block_of_hash[digest] = block_id
                self._hash_of_block[block_id] = digest

    def free(self, seq: Sequence) -> None:
        """Drops `seq`'s references. Tail first: the ends of prefixes are evicted before their
        beginnings, which more sequences share."""
        ref_counts = self._ref_counts
        for block_id in reversed(seq.block_table):
            ref_counts[block_id] -= 1
            self.num_shared_blocks -= ref_counts[block_id] == 1
            if ref_counts[block_id] == 0:
                if self._hash_of_block[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._unreferenced[block_id] = None
        seq.block_table = []
        seq.capacity = 0
        seq.num_computed_tokens = seq.num_scheduled_tokens = 0

    def num_exclusive_blocks(self, seq: Sequence) -> int:
        """Blocks of `seq` that nobody shares: what freeing it gives back."""
        ref_counts = self._ref_counts
        return sum(ref_counts[block_id] == 1 for block_id in seq.block_table)

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix; blocks in use stay with their sequences."""
        self._free.extend(self._unreferenced)
        self._unreferenced.clear()
        self._block_of_hash.clear()
        self._hash_of_block = [None] * self.num_blocks

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless the books balance for exactly these live sequences."""
        sequences = list(sequences)
        uses = Counter(chain.from_iterable(seq.block_table for seq in sequences))
        for block_id, count in enumerate(self._ref_counts):
            assert count == uses[block_id], f"block {block_id}: {count} != {uses[block_id]} uses"
        assert self.num_shared_blocks == sum(count >= 2 for count in self._ref_counts)
        free, unreferenced = set(self._free), set(self._unreferenced)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert not free & unreferenced, free & unreferenced
        idle = {block_id for block_id, count in enumerate(self._ref_counts) if count == 0}
        assert free | unreferenced == idle, (free, unreferenced, idle)
        cached = {b: h for b, h in enumerate(self._hash_of_block) if h is not None}
        assert {h: b for b, h in cached.items()} == self._block_of_hash, "cache maps differ"
        assert not free & cached.keys(), "a cached block is in the free list"
        assert unreferenced <= cached.keys(), "an uncached block is in the LRU"
        for seq in sequences:
            table = seq.block_table
            assert len(set(table)) == len(table), seq
            assert seq.capacity == len(table) * self.block_size, seq
            assert seq.num_computed_tokens <= seq.capacity, seq
            for block_id in table[seq.num_computed_tokens // self.block_size :]:
                assert uses[block_id] == 1, f"block {block_id} is shared and written by {seq}"
                assert block_id not in cached, f"block {block_id} is cached and written by {seq}"

    def _match_parent(self, seq: Sequence) -> list[int]:
        """The full blocks of the prompt, while a fork's parent has them for sure: it decodes, and
        it would not be displaced for `seq`."""
        parent = seq.parent
        if (
            parent is None
            or parent.status is not SequenceStatus.DECODE
            or parent.paused
            or parent.priority > seq.priority
        ):
            return []
        hits = parent.block_table[: (seq.num_prompt_tokens - 1) // self.block_size]
        if len(seq.block_hashes) < len(hits):
            seq.block_hashes = parent.block_hashes[: len(hits)]
        return hits

    def _take(self) -> int:
        """A free block, else the least recently used cached one."""
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._unreferenced.popitem(last=False)
            digest = self._hash_of_block[block_id]
            assert digest is not None, block_id
            del self._block_of_hash[digest]
            self._hash_of_block[block_id] = None
        self._ref_counts[block_id] = 1
        return block_id

    def _hash(self, seq: Sequence, i: int) -> bytes:
        """Digest of `seq`'s full block `i` and all before it, remembered in `block_hashes`.

        128 bits of a cryptographic hash: two prefixes that share one do not occur, not even on
        purpose, so a hit needs no comparison of tokens.
        """
        hashes = seq.block_hashes
        assert i == len(hashes), (i, seq)
        start = i * self.block_size
        tokens = array("q", seq.token_ids[start : start + self.block_size])
        parent = hashes[-1] if hashes else seq.cache_salt
        # Roots hash in a domain of their own: no cache_salt can pass for another chain's digest.
        domain = b"chain" if hashes else b"root"
        digest = blake2b(parent + tokens.tobytes(), digest_size=16, salt=domain).digest()
        hashes.append(digest)
        return digest
