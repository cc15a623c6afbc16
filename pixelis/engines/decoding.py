"""Batched decoding: the KV cache of a wave, sampling, and the decoding loop. Plain torch, no asyncio.

A wave is a batch of rows (requests). Each distinct new prompt is prefilled once; rows of open episodes bring
keys and values from earlier waves. Then all rows decode together until each has its stop token or reaches its
limit.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from pixelis.dialogue.session import MIN_TEMPERATURE, Completion, SamplingParams
from pixelis.errors import BadInput
from pixelis.families.features import Features, concatenate
from pixelis.policy.forward import FeatureCache, VisionLanguageModel
from pixelis.policy.log_probs import banned_mask
from pixelis.policy.samples import view_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pixelis.families.family import ModelSpec

MIN_TOP_P = 1e-6
"""Lower values keep no other tokens, and the lowest are 0 in float32, which would keep none."""
COMPACT = 0.5
"""Finished rows are dropped from the batch once at most this share of the rows is unfinished."""


class KeyValues:
    """KV cache of a batch, [rows, kv heads, columns, width] per layer, written in place.

    valid: columns with a token of the row, without the padding; used: filled columns; states: of layers with a
    recurrent state instead, replaced at each forward pass.
    """

    def __init__(self, rows: int, columns: int, device: torch.device):
        self.keys: dict[int, Float[Tensor, "rows heads columns width"]] = {}
        self.values: dict[int, Float[Tensor, "rows heads columns width"]] = {}
        self.states: dict[int, Any] = {}
        self.valid: Bool[Tensor, "rows columns"] = torch.zeros(rows, columns, dtype=torch.bool, device=device)
        self.used = 0

    def update(
        self,
        key: Float[Tensor, "rows heads new width"],
        value: Float[Tensor, "rows heads new width"],
        layer: int,
    ) -> tuple[Float[Tensor, "rows heads columns width"], Float[Tensor, "rows heads columns width"]]:
        """Store the new columns of a layer and return all so far; called by the attention of transformers."""
        rows, heads, new, width = key.shape
        if layer not in self.keys:
            shape = (rows, heads, self.valid.shape[1], width)
            self.keys[layer], self.values[layer] = key.new_empty(shape), value.new_empty(shape)
        stop = self.used + new
        self.keys[layer][:, :, self.used : stop] = key
        self.values[layer][:, :, self.used : stop] = value
        return self.keys[layer][:, :, :stop], self.values[layer][:, :, :stop]


@dataclass(slots=True)
class Past:
    """An episode between turns: its row in a KV cache, and the last token, which is not in the cache.

    origin: hash of the first prompt.
    """

    store: KeyValues
    row: int
    token: int
    position: int
    origin: int

    @torch.inference_mode()
    def alone(self) -> Past:
        """The same without the other rows of its cache, which then need not stay in memory."""
        row = torch.tensor([self.row], device=self.store.valid.device)
        return replace(self, store=join([(self.store, row)], 0), row=0)


@dataclass(slots=True)
class Row:
    """One request of a wave.

    key: rows with equal keys and prompts are prefilled once; None is never shared. stream: seed of the row's
    random numbers. prompt: numbers of tokens and views that are the first prompt, if they are not all.
    on_token: called with the number and the id of each new token. `Decoder.prepare` sets the
    others: ids from the last sampled token on, positions, the next free one, hash of the first prompt,
    digests of the views; the prefill: given_log_probs, as in a `Completion`.
    """

    tokens: Sequence[int]
    views: Sequence[np.ndarray]
    sampling: SamplingParams
    past: Past | None = None
    key: object = None
    stream: tuple[int, ...] = ()
    prompt: tuple[int, int] | None = None
    on_token: Callable[[int, int], None] | None = None
    ids: Int64[np.ndarray, " tokens"] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    positions: Int64[np.ndarray, "3 tokens"] = field(default_factory=lambda: np.empty((3, 0), dtype=np.int64))
    free: int = 0
    origin: int = 0
    digests: list[bytes] = field(default_factory=list)
    given_log_probs: list[float] = field(default_factory=list)


class Decoder:
    def __init__(self, model: VisionLanguageModel, spec: ModelSpec, tokenizer: PreTrainedTokenizerBase):
        self.model, self.spec, self.tokenizer = model, spec, tokenizer
        self.device = next(model.parameters()).device
        self.banned = banned_mask(spec.banned, spec.vocab, self.device)
        self.features = FeatureCache()
        self.tokens_read = self.tokens_reused = self.tokens_written = 0

    def prepare(self, row: Row) -> None:
        """Compute the positions and digests of a row. Raises BadInput if its tokens and views disagree."""
        past = row.past
        if row.sampling.given_log_probs > len(row.tokens) - (past is None):
            raise BadInput(f"no log-probs of {row.sampling.given_log_probs} of {len(row.tokens)} tokens")
        row.ids = np.asarray(row.tokens if past is None else [past.token, *row.tokens], dtype=np.int64)
        sizes = [(view.shape[0], view.shape[1]) for view in row.views]
        start = 0 if past is None else past.position
        row.positions, row.free = self.spec.family.positions(self.spec, row.ids, sizes, start)
        row.digests = [view_digest(view) for view in row.views]
        length, shown = row.prompt or (None, None)
        first = [row.ids[:length].tobytes(), *row.digests[:shown]]
        prompt = hashlib.blake2b(b"".join(first), digest_size=8)
        row.origin = int.from_bytes(prompt.digest()) if past is None else past.origin

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> list[tuple[Completion, Past]]:
        """Decode prepared rows together; returns the results in order. The given pasts are not modified."""
        order = sorted(range(len(rows)), key=lambda i: rows[i].past is not None)
        fresh = [rows[i] for i in order if rows[i].past is None]
        continued = [rows[i] for i in order if rows[i].past is not None]
        extra = max(row.sampling.max_tokens for row in rows)
        parts, hidden = [], []
        if fresh:
            # Contents are compared too: a wrong key costs time but never gives a wrong answer.
            keys = [
                object()
                if row.key is None or row.sampling.given_log_probs
                else (row.key, row.ids.tobytes(), *row.digests)
                for row in fresh
            ]
            distinct: dict[object, Row] = {}
            for key, row in zip(keys, fresh, strict=True):
                distinct.setdefault(key, row)
            members, numbers = list(distinct.values()), {key: i for i, key in enumerate(distinct)}
            store = KeyValues(len(members), max(len(row.ids) for row in members), self.device)
            index = torch.tensor([numbers[key] for key in keys], device=self.device)
            hidden.append(self._prefill(members, store)[index])
            parts.append((store, index))
            self.tokens_reused += sum(len(row.ids) for row in fresh) - sum(len(row.ids) for row in members)
        if continued:
            longest = max(len(row.ids) for row in continued)
            store = self._gather(continued, longest + (0 if fresh else extra))
            hidden.append(self._prefill(continued, store))
            parts.append((store, torch.arange(len(continued), device=self.device)))
        store = join(parts, extra) if fresh else parts[0][0]
        results = self._decode([*fresh, *continued], store, torch.cat(hidden))
        by_row = dict(zip(order, results, strict=True))
        return [by_row[i] for i in range(len(rows))]

    def _gather(self, rows: Sequence[Row], extra: int) -> KeyValues:
        """Copy the pasts of rows from any number of stores into one store, in the order of `rows`."""
        pasts = [row.past for row in rows if row.past is not None]
        self.tokens_reused += sum(past.position for past in pasts)
        parts = []
        for _, group in itertools.groupby(pasts, key=lambda past: id(past.store)):
            members = list(group)
            numbers = torch.tensor([past.row for past in members], device=self.device)
            parts.append((members[0].store, numbers))
        return join(parts, extra)

    def _prefill(self, rows: Sequence[Row], store: KeyValues) -> Float[Tensor, "rows width"]:
        """Append the rows' tokens to the store, padded at the right; returns the last tokens' hidden states."""
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
        start = store.used
        store.valid[:, start : start + longest] = inside
        # A token attends to all valid columns up to its own.
        causal = torch.ones(longest, start + longest, dtype=torch.bool, device=self.device).tril(start)
        # A padding query must see something: else its softmax is NaN, which spreads to other rows through
        # masked sums.
        mask = (store.valid[:, None, : start + longest] & causal) | ~inside[:, :, None]
        features, views = None, [view for row in rows for view in row.views]
        if views:
            digests = [digest for row in rows for digest in row.digests]
            features = concatenate(self.features.get(self.model, self.spec, views, digests))
        hidden = self._forward(
            torch.from_numpy(tokens).to(self.device),
            torch.from_numpy(positions).to(self.device),
            mask[:, None],
            store,
            features,
        )
        for row, length, states in zip(rows, lengths, hidden, strict=True):
            if count := row.sampling.given_log_probs:
                targets = torch.from_numpy(row.ids[-count:]).to(self.device)
                logits = self.model.lm_head(states[length - count - 1 : length - 1]).float() + self.banned
                values = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
                row.given_log_probs = values.tolist()
        return hidden[torch.arange(len(rows), device=self.device), size - 1]

    def _forward(
        self,
        tokens: Int[Tensor, "rows new"],
        positions: Int[Tensor, "3 rows new"],
        mask: Bool[Tensor, "rows 1 new columns"],
        store: KeyValues,
        features: Features | None = None,
    ) -> Float[Tensor, "rows new width"]:
        hidden = self.spec.family.hidden_states(
            self.model,
            self.spec,
            tokens,
            positions,
            features,
            attention_mask=mask,
            past_key_values=store,
            use_cache=True,
        )
        store.used += tokens.shape[1]
        return hidden

    def _decode(
        self, rows: Sequence[Row], store: KeyValues, hidden: Float[Tensor, "rows width"]
    ) -> list[tuple[Completion, Past]]:
        limits = [row.sampling.max_tokens for row in rows]
        # A batch of questions shares a seed: without the prompt's hash all groups would draw the same numbers.
        streams = [(*row.stream, row.origin) for row in rows]
        sampler = Sampler([row.sampling for row in rows], streams, max(limits), self.device)
        output = Output(rows, self.spec, self.device)
        limit = torch.tensor(limits, device=self.device)
        position = torch.tensor([row.free for row in rows], device=self.device)
        # Indices of the rows in the store; `going` marks the unfinished ones.
        alive = torch.arange(len(rows), device=self.device)
        location: list[tuple[KeyValues, int]] = [(store, i) for i in range(len(rows))]
        going = torch.ones(len(rows), dtype=torch.bool, device=self.device)
        for step in range(max(limits)):
            chosen, probabilities = sampler(self.model.lm_head(hidden).float() + self.banned, alive, step)
            output.add(step, alive, going, chosen, probabilities)
            if stopped := self._watch(rows, alive[going].tolist(), output, step):
                going &= torch.tensor([i not in stopped for i in alive.tolist()], device=self.device)
            going &= (chosen != self.spec.stop) & (limit[alive] > step + 1)
            unfinished = int(going.sum())
            if unfinished == 0:
                break
            if unfinished <= COMPACT * len(alive):
                remaining = going.nonzero()[:, 0]
                alive, chosen, going = alive[remaining], chosen[remaining], going[remaining]
                store = join([(store, remaining)], max(limits) - step - 1)
                for new_row, i in enumerate(alive.tolist()):
                    location[i] = (store, new_row)
            store.valid[:, store.used] = going
            current = position[alive]
            hidden = self._forward(
                chosen[:, None],
                current[None, :, None].expand(3, -1, 1),
                store.valid[:, None, None, : store.used + 1],
                store,
            )[:, 0]
            position[alive] = current + going
        completions = output.completions()
        self.tokens_written += sum(len(completion.tokens) for completion in completions)
        pasts = [
            Past(*place, completion.tokens[-1], free, row.origin)
            for row, completion, place, free in zip(
                rows, completions, location, position.tolist(), strict=True
            )
        ]
        return list(zip(completions, pasts, strict=True))

    def _watch(self, rows: Sequence[Row], numbers: Sequence[int], output: Output, step: int) -> set[int]:
        """Pass on the new tokens of these rows; returns those whose last token completes the stop text."""
        for i in numbers:
            row = rows[i]
            if row.on_token is not None:
                row.on_token(step, int(output.tokens[i, step]))
            if stop := row.sampling.stop:  # a token has at least one byte
                last = output.tokens[i, max(0, step + 1 - len(stop.encode())) : step + 1]
                if stop in str(self.tokenizer.decode(last.tolist())):
                    output.stopped.add(i)
        return output.stopped.intersection(numbers)


class Output:
    """What a wave has generated: tokens, their log-probabilities and the most likely ones, by row and step."""

    def __init__(self, rows: Sequence[Row], spec: ModelSpec, device: torch.device):
        self.rows, self.stop, self.stopped = rows, spec.stop, set[int]()
        count, steps = len(rows), max(row.sampling.max_tokens for row in rows)
        most = min(max(row.sampling.top_log_probs for row in rows), spec.vocab)
        self.tokens = torch.full((count, steps), spec.stop, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(count, steps, device=device)
        self.top_tokens = torch.zeros(count, steps, most, dtype=torch.int64, device=device)
        self.top_log_probs = torch.zeros(count, steps, most, device=device)
        self.length = torch.zeros(count, dtype=torch.int64, device=device)

    def add(
        self,
        step: int,
        alive: Int[Tensor, " alive"],
        going: Bool[Tensor, " alive"],
        chosen: Int[Tensor, " alive"],
        probabilities: Float[Tensor, "alive vocab"],
    ) -> None:
        """Add the `chosen` tokens of the `alive` rows that are `going`."""
        rows, most = alive[going], self.top_tokens.shape[2]
        self.tokens[rows, step] = chosen[going]
        self.log_probs[rows, step] = probabilities.gather(1, chosen[:, None])[going, 0].log()
        if most:
            top = probabilities[going].topk(most)
            self.top_tokens[rows, step], self.top_log_probs[rows, step] = top.indices, top.values.log()
        self.length[rows] = step + 1

    def completions(self) -> list[Completion]:
        result = []
        columns = self.tokens.tolist(), self.log_probs.tolist(), self.length.tolist()
        tops = self.top_tokens.tolist(), self.top_log_probs.tolist()
        for i, (row, tokens, values, size) in enumerate(zip(self.rows, *columns, strict=True)):
            is_stopped = tokens[size - 1] == self.stop or i in self.stopped
            completion = Completion(
                tokens[:size],
                values[:size],
                "stop" if is_stopped else "length",
                given_log_probs=row.given_log_probs,
            )
            if number := row.sampling.top_log_probs:
                likely = zip(tops[0][i][:size], tops[1][i][:size], strict=True)
                completion.top_log_probs = [
                    [
                        pair
                        for pair in zip(ids[:number], logs[:number], strict=True)
                        if pair[1] > float("-inf")
                    ]
                    for ids, logs in likely
                ]
            result.append(completion)
        return result


class Sampler:
    """Samples the next token of each row with its own settings and random numbers."""

    def __init__(
        self,
        settings: Sequence[SamplingParams],
        streams: Sequence[tuple[int, ...]],
        steps: int,
        device: torch.device,
    ):
        # Raised, not refused: one caller's row must not end the wave of all.
        temperature = torch.tensor(
            [s.temperature and max(s.temperature, MIN_TEMPERATURE) for s in settings], device=device
        )
        self.greedy = temperature == 0
        # A greedy row reports log-probabilities at temperature 1.
        self.temperature = torch.where(self.greedy, 1.0, temperature)
        self.top_p = torch.tensor([max(s.top_p, MIN_TOP_P) for s in settings], device=device)
        self.any_top_p = any(s.top_p < 1 for s in settings)
        self.all_greedy = all(s.temperature == 0 for s in settings)
        # All numbers are drawn in advance, so that a row's numbers do not depend on the other rows.
        uniform = np.zeros((len(settings), steps), dtype=np.float32)
        for i, (setting, stream) in enumerate(zip(settings, streams, strict=True)):
            if setting.temperature > 0:
                uniform[i, : setting.max_tokens] = np.random.default_rng(stream).random(
                    setting.max_tokens, dtype=np.float32
                )
        self.uniform = torch.from_numpy(uniform).to(device)

    def __call__(
        self, logits: Float[Tensor, "alive vocab"], alive: Int[Tensor, " alive"], step: int
    ) -> tuple[Int[Tensor, " alive"], Float[Tensor, "alive vocab"]]:
        """Sample a token for each row of `alive` from masked logits; returns (tokens, distributions)."""
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
            # Strictly below the total, so that the search finds a token with a probability above 0.
            target = torch.minimum(
                self.uniform[alive, step][:, None] * total, torch.nextafter(total, torch.zeros_like(total))
            )
            sampled = torch.searchsorted(cumulative, target, right=True)[:, 0]
            possible = probabilities.gather(1, sampled[:, None])[:, 0] > 0
            chosen = torch.where(greedy | ~possible, best, sampled)
        return chosen, probabilities


def nucleus(
    logits: Float[Tensor, "rows vocab"], top_p: Float[Tensor, " rows"]
) -> Float[Tensor, "rows vocab"]:
    """Set logits outside the smallest set of tokens with probability >= top_p to -inf."""
    ranked, index = torch.softmax(logits, dim=-1).sort(dim=-1, descending=True)
    outside = (ranked.cumsum(dim=-1) - ranked >= top_p[:, None]) & (top_p < 1)[:, None]
    return logits.masked_fill(torch.zeros_like(outside).scatter(1, index, outside), float("-inf"))


def join(parts: Sequence[tuple[KeyValues, Int[Tensor, " rows"]]], extra: int) -> KeyValues:
    """Copy rows of stores into one store, packed, with room for `extra` columns; parts: (store, its rows)."""
    valid = [store.valid[rows, : store.used] for store, rows in parts]
    widest = max(int(v.sum(dim=1).max()) for v in valid)
    count = sum(len(rows) for _, rows in parts)
    out = KeyValues(count, widest + extra, parts[0][0].valid.device)
    out.used = widest
    start = 0
    for source, target in ((parts[0][0].keys, out.keys), (parts[0][0].values, out.values)):
        for layer, template in source.items():
            _, heads, _, width = template.shape
            target[layer] = template.new_zeros(count, heads, widest + extra, width)
    for (store, rows), mask in zip(parts, valid, strict=True):
        sizes = mask.sum(dim=1)
        # Valid columns first, in their order.
        columns = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)[:, : int(sizes.max())]
        stop, longest = start + len(rows), columns.shape[1]
        out.valid[start:stop, :longest] = torch.arange(longest, device=mask.device)[None] < sizes[:, None]
        for source, target in ((store.keys, out.keys), (store.values, out.values)):
            for layer, old in source.items():
                target[layer][start:stop, :, :longest] = old[rows[:, None], :, columns].transpose(1, 2)
        start = stop
    for layer, state in parts[0][0].states.items():
        members = [store.states[layer].rows(rows) for store, rows in parts]
        out.states[layer] = type(state)(*map(torch.cat, zip(*members, strict=True)))
    return out
