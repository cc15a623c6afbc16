"""Decoding many rows together: keys and values of a wave, sampling, and the loop. Plain torch, no asyncio.

A wave is a batch of rows, each with its own past. New prompts are read once per distinct prompt; rows that go on bring their keys
and values from earlier waves; then all rows decode together until each has written its stop token or its last allowed one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from pixelis.dialogue.positions import mrope_positions
from pixelis.dialogue.session import Completion, SamplingParams
from pixelis.policy.forward import FeatureCache, Features, VisionLanguageModel, concatenate, hidden_states
from pixelis.policy.log_probs import banned_mask
from pixelis.policy.samples import view_digest

if TYPE_CHECKING:
    from pixelis.dialogue.spec import ModelSpec

SHRINK = 0.5
"""Decoding goes on with fewer rows once this share of them is left."""


class KeyValues:
    """Keys and values of some rows, [rows, kv heads, columns, width] per layer, written in place.

    valid: bool [rows, columns], which columns hold a token of the row; columns between are padding and never attended to.
    """

    def __init__(self, rows: int, columns: int, device: torch.device):
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.valid = torch.zeros(rows, columns, dtype=torch.bool, device=device)
        self.used = 0

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What transformers' attention calls: store the new columns of a layer and return all columns so far."""
        rows, heads, new, width = key.shape
        if layer == len(self.keys):
            shape = (rows, heads, self.valid.shape[1], width)
            self.keys.append(key.new_empty(shape))
            self.values.append(value.new_empty(shape))
        stop = self.used + new
        self.keys[layer][:, :, self.used : stop] = key
        self.values[layer][:, :, self.used : stop] = value
        return self.keys[layer][:, :, :stop], self.values[layer][:, :, :stop]


@dataclass(slots=True)
class Past:
    """What an episode has read: its row of a wave's keys and values; the last sampled token, not read yet, and its position.

    origin: a hash of the first prompt.
    """

    store: KeyValues
    row: int
    token: int
    position: int
    origin: int


@dataclass(slots=True)
class Row:
    """One request of a wave.

    key groups equal first prompts, None stands alone; stream seeds the row's random numbers. `Decoder.prepare` fills the rest:
    ids (with the last sampled token in front), their positions [3, n], the next free position, the hash of the first prompt, the
    digests of the views.
    """

    tokens: Sequence[int]
    views: Sequence[np.ndarray]
    sampling: SamplingParams
    past: Past | None = None
    key: object = None
    stream: tuple[int, ...] = ()
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    positions: np.ndarray = field(default_factory=lambda: np.empty((3, 0), dtype=np.int64))
    free: int = 0
    origin: int = 0
    digests: list[bytes] = field(default_factory=list)


class Decoder:
    """The model with what decoding needs: banned ids, the stop token, the features of views seen before."""

    def __init__(self, model: VisionLanguageModel, spec: ModelSpec):
        self.model, self.spec = model, spec
        self.device = next(model.parameters()).device
        self.banned = banned_mask(spec.banned, spec.vocab, self.device)
        self.features = FeatureCache()
        self.tokens_read = self.tokens_reused = self.tokens_written = 0

    def prepare(self, row: Row) -> None:
        """Positions and view digests of a row. Raises BadInput when its tokens and views disagree."""
        past = row.past
        row.ids = np.asarray(row.tokens if past is None else [past.token, *row.tokens], dtype=np.int64)
        grids = [self.spec.grid(view.shape[0], view.shape[1]) for view in row.views]
        start = 0 if past is None else past.position
        row.positions, row.free = mrope_positions(row.ids, grids, self.spec.image_token, self.spec.merge, start)
        row.digests = [view_digest(view) for view in row.views]
        prompt = hashlib.blake2b(b"".join([row.ids.tobytes(), *row.digests]), digest_size=8)
        row.origin = int.from_bytes(prompt.digest()) if past is None else past.origin

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> list[tuple[Completion, Past]]:
        """Decode prepared rows together; results in their order. The pasts that came in stay as they were."""
        fresh = [i for i, row in enumerate(rows) if row.past is None]
        going = [i for i, row in enumerate(rows) if row.past is not None]
        extra = max(row.sampling.max_tokens for row in rows)
        order, parts, hidden = [], [], []
        if fresh:
            distinct: dict[object, int] = {}
            place = [distinct.setdefault(self._prompt(rows[i]), len(distinct)) for i in fresh]
            first = dict(zip(reversed(place), reversed(fresh), strict=True))
            members = [rows[first[p]] for p in range(len(distinct))]
            longest = max(len(row.ids) for row in members)
            store = KeyValues(len(members), longest, self.device)
            last = self._read(members, store)
            index = torch.tensor(place, device=self.device)
            order += fresh
            parts.append((store, index))
            hidden.append(last[index])
            self.tokens_reused += sum(len(rows[i].ids) for i in fresh) - sum(len(row.ids) for row in members)
        if going:
            members = [rows[i] for i in going]
            longest = max(len(row.ids) for row in members)
            store = self._gather(members, longest + (0 if fresh else extra))
            hidden.append(self._read(members, store))
            order += going
            parts.append((store, torch.arange(len(members), device=self.device)))
        state = parts[0][0] if len(parts) == 1 and not fresh else join(parts, extra)
        results = self._decode([rows[i] for i in order], state, torch.cat(hidden))
        back = dict(zip(order, results, strict=True))
        return [back[i] for i in range(len(rows))]

    def _prompt(self, row: Row) -> object:
        # The contents are compared too: a wrong key costs time, never a wrong answer.
        return object() if row.key is None else (row.key, row.ids.tobytes(), *row.digests)

    def _gather(self, rows: Sequence[Row], extra: int) -> KeyValues:
        """The pasts of rows that go on, from whichever waves they come, as one store in the order of `rows`."""
        stores: dict[int, tuple[KeyValues, list[int], list[int]]] = {}
        for i, row in enumerate(rows):
            if row.past is None:
                raise ValueError("a row without a past has nothing to gather")
            self.tokens_reused += row.past.position
            _, places, members = stores.setdefault(id(row.past.store), (row.past.store, [], []))
            places.append(row.past.row)
            members.append(i)
        parts = [(store, torch.tensor(places, device=self.device)) for store, places, _ in stores.values()]
        order = [i for _, _, members in stores.values() for i in members]
        if order != sorted(order):
            joined = join(parts, 0)
            back = torch.empty(len(order), dtype=torch.int64, device=self.device)
            back[torch.tensor(order, device=self.device)] = torch.arange(len(order), device=self.device)
            parts = [(joined, back)]
        return join(parts, extra)

    def _read(self, rows: Sequence[Row], store: KeyValues) -> torch.Tensor:
        """Read the rows' tokens behind what the store holds (padded at the right); the hidden state of each row's last token."""
        lengths = [len(row.ids) for row in rows]
        longest = max(lengths)
        tokens = np.full((len(rows), longest), self.spec.pad, dtype=np.int64)
        positions = np.zeros((3, len(rows), longest), dtype=np.int64)
        for i, row in enumerate(rows):
            tokens[i, : lengths[i]] = row.ids
            positions[:, i, : lengths[i]] = row.positions
        self.tokens_read += sum(lengths)
        size = torch.tensor(lengths, device=self.device)
        inside = torch.arange(longest, device=self.device)[None] < size[:, None]
        before = store.used
        store.valid[:, before : before + longest] = inside
        # A token sees all valid columns up to its own.
        causal = torch.ones(longest, before + longest, dtype=torch.bool, device=self.device).tril(before)
        # A padding query must see something, or its softmax is NaN and spreads to real rows through masked sums.
        mask = (store.valid[:, None, : before + longest] & causal) | ~inside[:, :, None]
        hidden = self._forward(
            torch.from_numpy(tokens).to(self.device),
            torch.from_numpy(positions).to(self.device),
            mask[:, None],
            store,
            self._see(rows),
        )
        return hidden[torch.arange(len(rows), device=self.device), size - 1]

    def _see(self, rows: Sequence[Row]) -> Features | None:
        views = [view for row in rows for view in row.views]
        if not views:
            return None
        digests = [digest for row in rows for digest in row.digests]
        return concatenate(self.features.get(self.model, self.spec, views, digests))

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, store: KeyValues, seen: Features | None = None
    ) -> torch.Tensor:
        hidden = hidden_states(
            self.model, tokens, positions, seen, self.spec.image_token, attention_mask=mask, past_key_values=store, use_cache=True
        )
        store.used += tokens.shape[1]
        return hidden

    def _decode(self, rows: Sequence[Row], store: KeyValues, hidden: torch.Tensor) -> list[tuple[Completion, Past]]:
        count = len(rows)
        limits = [row.sampling.max_tokens for row in rows]
        steps = max(limits)
        # One seed serves a whole batch of questions: without the prompt in it, all groups would draw the same numbers.
        draw = Draw([row.sampling for row in rows], [(*row.stream, row.origin) for row in rows], steps, self.device)
        limit = torch.tensor(limits, device=self.device)
        position = torch.tensor([row.free for row in rows], device=self.device)
        written = torch.full((count, steps), self.spec.stop, dtype=torch.int64, device=self.device)
        log_probs = torch.zeros(count, steps, device=self.device)
        length = torch.zeros(count, dtype=torch.int64, device=self.device)
        # Rows still decoding, as indices into all rows; the store's rows follow the same order.
        alive = torch.arange(count, device=self.device)
        home: list[tuple[KeyValues, int]] = [(store, i) for i in range(count)]
        going = torch.ones(count, dtype=torch.bool, device=self.device)
        for step in range(steps):
            chosen, log_prob = draw(self.model.lm_head(hidden).float() + self.banned, alive, step)
            open_rows = alive[going]
            written[open_rows, step] = chosen[going]
            log_probs[open_rows, step] = log_prob[going]
            length[open_rows] = step + 1
            going &= (chosen != self.spec.stop) & (limit[alive] > step + 1)
            left = int(going.sum())
            if left == 0:
                break
            if left <= SHRINK * len(alive):
                kept = going.nonzero()[:, 0]
                alive, chosen, going = alive[kept], chosen[kept], going[kept]
                store = join([(store, kept)], steps - step - 1)
                for new_row, i in enumerate(alive.tolist()):
                    home[i] = (store, new_row)
            store.valid[:, store.used] = going
            now = position[alive]
            hidden = self._forward(
                chosen[:, None],
                now[None, :, None].expand(3, -1, 1),
                store.valid[:, None, None, : store.used + 1],
                store,
            )[:, 0]
            position[alive] = now + going
        results = []
        columns = zip(rows, written.tolist(), log_probs.tolist(), length.tolist(), position.tolist(), home, strict=True)
        for row, tokens, values, size, free, (where, place) in columns:
            tokens, values = tokens[:size], values[:size]
            self.tokens_written += size
            completion = Completion(tokens, values, "stop" if tokens[-1] == self.spec.stop else "length")
            results.append((completion, Past(where, place, tokens[-1], free, row.origin)))
        return results


class Draw:
    """Samples the next token of each row from its own settings and its own stream of random numbers."""

    def __init__(self, settings: Sequence[SamplingParams], streams: Sequence[tuple[int, ...]], steps: int, device: torch.device):
        temperature = torch.tensor([s.temperature for s in settings], device=device)
        self.greedy = temperature == 0
        # A greedy row reports log-probabilities at temperature 1.
        self.temperature = torch.where(self.greedy, 1.0, temperature)
        self.top_p = torch.tensor([s.top_p for s in settings], device=device)
        self.any_top_p = any(s.top_p < 1 for s in settings)
        self.all_greedy = all(s.temperature == 0 for s in settings)
        # One draw per row and step, made ahead: a row's stream does not depend on its neighbours.
        uniform = np.zeros((len(settings), steps), dtype=np.float32)
        for i, (setting, stream) in enumerate(zip(settings, streams, strict=True)):
            if setting.temperature > 0:
                uniform[i, : setting.max_tokens] = np.random.default_rng(stream).random(setting.max_tokens, dtype=np.float32)
        self.uniform = torch.from_numpy(uniform).to(device)

    def __call__(self, logits: torch.Tensor, alive: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens int64 [n], their log-probabilities [n]) from masked logits float32 [n, vocab] of the rows `alive` [n]."""
        greedy = self.greedy[alive]
        scaled = logits / self.temperature[alive][:, None]
        if self.any_top_p:
            scaled = nucleus(scaled, torch.where(greedy, 1.0, self.top_p[alive]))
        probabilities = torch.softmax(scaled, dim=-1)
        best = logits.argmax(dim=-1)
        if self.all_greedy:
            chosen = best
        else:
            cumulative = probabilities.cumsum(dim=-1)
            total = cumulative[:, -1:]
            # Strictly below the total, so that the search ends on a token with a probability above 0.
            target = torch.minimum(self.uniform[alive, step][:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
            drawn = torch.searchsorted(cumulative, target, right=True)[:, 0]
            possible = probabilities.gather(1, drawn[:, None])[:, 0] > 0
            chosen = torch.where(greedy | ~possible, best, drawn)
        return chosen, probabilities.gather(1, chosen[:, None])[:, 0].log()


def nucleus(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Logits with everything outside the smallest set of probability >= top_p at -inf; rows with top_p 1 are unchanged."""
    ranked, index = torch.softmax(logits, dim=-1).sort(dim=-1, descending=True)
    outside = (ranked.cumsum(dim=-1) - ranked >= top_p[:, None]) & (top_p < 1)[:, None]
    return logits.masked_fill(torch.zeros_like(outside).scatter(1, index, outside), float("-inf"))


def join(parts: Sequence[tuple[KeyValues, torch.Tensor]], extra: int) -> KeyValues:
    """One store with the given rows of others one behind the other, their holes closed, and room for `extra` columns.

    parts: (store, int64 rows of it). The stores are left as they are.
    """
    valid = [store.valid[rows, : store.used] for store, rows in parts]
    widest = max(int(v.sum(dim=1).max()) for v in valid)
    count = sum(len(rows) for _, rows in parts)
    out = KeyValues(count, widest + extra, parts[0][0].valid.device)
    out.used = widest
    start = 0
    for source, target in ((parts[0][0].keys, out.keys), (parts[0][0].values, out.values)):
        for like in source:
            _, heads, _, width = like.shape
            target.append(like.new_zeros(count, heads, widest + extra, width))
    for (store, rows), mask in zip(parts, valid, strict=True):
        sizes = mask.sum(dim=1)
        # Valid columns first, in their order.
        columns = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)[:, : int(sizes.max())]
        stop, longest = start + len(rows), columns.shape[1]
        out.valid[start:stop, :longest] = torch.arange(longest, device=mask.device)[None] < sizes[:, None]
        for old, new in zip((*store.keys, *store.values), (*out.keys, *out.values), strict=True):
            new[start:stop, :, :longest] = old[rows[:, None], :, columns].transpose(1, 2)
        start = stop
    return out
