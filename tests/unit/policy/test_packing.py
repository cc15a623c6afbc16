"""Packing: nothing lost, nothing padded, and the same numbers as one sample at a time."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from tiny_policy import FAMILIES, Maker, packed_log_probs, spec, stock, stock_log_probs

from pixelis.errors import DataFailure
from pixelis.families.positions import mrope_positions
from pixelis.policy.forward import FeatureCache
from pixelis.policy.packing import Prompt, collate, pack, prompt_of
from pixelis.policy.samples import TrainSample, from_trajectory, once_per_view, unusable
from pixelis.records import ImageView, Trajectory, Turn


def rollouts(maker: Maker, count: int) -> list[TrainSample]:
    """Samples that begin with one prompt and its picture."""
    first, *others = (maker.sample(turns=1 + i % 3) for i in range(count))
    start = int(first.mask.argmax())
    for other in others:
        other.tokens[:start] = first.tokens[:start]
        other.views[0] = first.views[0].copy()
    return [first, *others]


def test_samples_of_one_prompt_share_a_bin():
    prompts = [Prompt("ab"[i % 2], 40) for i in range(8)]
    # 60 + 3 * (20 + 40 / 8) tokens, where all eight would be 480 without sharing.
    assert pack([60] * 8, 135, prompts) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert pack([60] * 8, 135, [Prompt(i, 40) for i in range(8)]) == pack([60] * 8, 135)


def test_a_prompt_is_shared_only_with_the_same_pictures():
    maker = Maker()
    samples = rollouts(maker, 3)
    samples[2].views[0] = maker.view()
    one, two, other = (prompt_of(s, spec()) for s in samples)
    assert one == two != other
    batch = collate(samples, spec(), share=True)
    assert len(batch.tokens) == sum(len(s.tokens) for s in samples) - one.length


def test_collated_tensors_describe_each_sample():
    maker = Maker()
    shared = maker.view()
    samples = [maker.sample(view=shared), maker.sample(turns=1), maker.sample(view=shared.copy())]
    batch = collate(samples, spec())
    assert torch.equal(batch.tokens, torch.from_numpy(np.concatenate([s.tokens for s in samples])))
    assert torch.equal(batch.mask, torch.from_numpy(np.concatenate([s.mask for s in samples])))
    assert batch.policy_tokens.tolist() == [s.policy_tokens for s in samples]
    for i, sample in enumerate(samples):
        own = batch.positions[:, batch.sequence == i]
        grids = [spec().grid(*v.shape[:2]) for v in sample.views]
        assert own[0].tolist() == list(range(len(sample.tokens)))
        expected = mrope_positions(sample.tokens, grids, spec().image_token, spec().merge)[0]
        assert np.array_equal(own[1:], expected)
    # The overview that two rollouts share (equal pixels, not the same array) is there once.
    assert len(batch.views) == 4
    first, third = (batch.sequence[batch.tokens == spec().image_token] == i for i in (0, 2))
    assert batch.image_rows[first][:4].tolist() == batch.image_rows[third][:4].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_log_probs_equal_those_of_single_unpadded_samples(family: str):
    maker = Maker(family)
    tokens, mask = np.asarray(maker.text(6)), np.arange(6) > 1
    text_only = TrainSample(tokens, mask, np.zeros(6, np.float32), 1.0, [])
    samples = [*(maker.sample(turns=1 + i % 3) for i in range(7)), text_only]
    model = stock(family)
    with torch.no_grad():
        expected = torch.cat([stock_log_probs(model, s, 0.7) for s in samples]).numpy()
    together = packed_log_probs(model, samples, 0.7)
    assert np.abs(together - expected).max() < 1e-4
    assert np.abs(together - packed_log_probs(model, samples, 0.7, chunk_values=2000)).max() < 1e-5


def test_features_are_computed_once_and_evicted_at_the_limit():
    maker, model = Maker(), stock()
    views = [maker.view(), maker.view(16, 32), maker.view()]
    digests = [bytes([i]) for i in range(3)]
    cache = FeatureCache()
    first = cache.get(model, spec(), [*views, views[0]], [*digests, digests[0]])
    repeated = cache.get(model, spec(), views, digests)
    assert (cache.misses, len(cache.entries)) == (3, 3)
    assert first[3] is first[0] is repeated[0]
    family = spec().family
    single = family.encode_views(model, spec(), [views[1]])[0]
    assert torch.allclose(first[1].embeds, single.embeds, atol=1e-5)
    assert torch.allclose(first[1].deepstack[0], single.deepstack[0], atol=1e-5)
    small = FeatureCache(limit=first[0].nbytes + first[1].nbytes)
    small.get(model, spec(), views, digests)
    assert digests[0] not in small.entries
    assert small.nbytes <= small.limit


def test_unusable_samples_are_named_by_cause():
    maker, s = Maker(), spec()
    good = maker.sample()
    assert unusable(good, s, 512) is None

    def changed(**values: object) -> TrainSample:
        fields = {k: getattr(good, k) for k in ("tokens", "mask", "log_probs", "advantage", "views")}
        return TrainSample(**{**fields, **values})

    n, banned, foreign = len(good.tokens), good.tokens.copy(), good.tokens.copy()
    banned[-1], foreign[0] = s.banned[0], s.vocab
    causes = {
        "over_context": unusable(good, s, n - 1),
        "no_policy_tokens": unusable(changed(mask=np.zeros(n, bool)), s, 512),
        "first_token": unusable(changed(mask=np.ones(n, bool)), s, 512),
        "bad_shape": unusable(changed(mask=good.mask[1:]), s, 512),
        "non_finite": unusable(changed(weights=np.full(n, np.inf, np.float32)), s, 512),
        "bad_token": unusable(changed(tokens=foreign), s, 512),
        "banned_token": unusable(changed(tokens=banned), s, 512),
        "views_mismatch": unusable(changed(views=good.views[:1]), s, 512),
        "bad_view": unusable(changed(views=[good.views[0], good.views[0][:30, :30]]), s, 512),
    }
    assert causes == {name: name for name in causes}
    assert unusable(changed(advantage=float("nan")), s, 512) == "non_finite"
    assert unusable(changed(weights=np.ones(n - 1, np.float32)), s, 512) == "bad_shape"
    # An episode whose first prompt does not fit the context has no turn.
    empty = changed(tokens=good.tokens[:0], mask=good.mask[:0], log_probs=good.log_probs[:0], views=[])
    assert unusable(empty, s, 512) == "no_policy_tokens"


def test_a_trajectory_becomes_a_sample_and_an_unanswered_observation_is_cut():
    turns = [
        Turn(role="user", tokens=[10, 5, 5, 11], images=["img0"]),
        Turn(role="assistant", tokens=[12, 2], log_probs=[-0.5, -0.25]),
        Turn(role="tool", tokens=[13, 5, 5], images=["obs1"]),
    ]
    images = [ImageView(id="img0"), ImageView(id="obs1")]
    trajectory = Trajectory(question_id="q", images=images, turns=turns, advantage=0.5, policy_version=7)
    views = [np.zeros((16, 32, 3), np.uint8), np.ones((16, 32, 3), np.uint8)]
    sample = from_trajectory(trajectory, views)
    assert sample.tokens.tolist() == [10, 5, 5, 11, 12, 2]
    assert sample.mask.tolist() == [False] * 4 + [True] * 2
    assert sample.log_probs.tolist() == [0, 0, 0, 0, -0.5, -0.25]
    assert (sample.advantage, sample.version, len(sample.views)) == (0.5, 7, 1)
    assert from_trajectory(trajectory, views, advantage=-1.0).advantage == -1.0
    whole = from_trajectory(trajectory, views, whole=True)
    assert (len(whole.tokens), len(whole.views)) == (9, 2)
    with pytest.raises(DataFailure, match="1 views for 2 images"):
        from_trajectory(trajectory, views[:1])


def test_a_view_that_rollouts_share_is_hashed_once_and_nothing_is_kept_of_it() -> None:
    calls: list[int] = []

    @once_per_view
    def mean(view: np.ndarray) -> float:
        calls.append(len(calls))
        return float(view.mean())

    view = np.zeros((4, 4, 3), np.uint8)
    assert [mean(view), mean(view)] == [0, 0]
    view[:] = 7
    assert mean(view) == 7, "what can change is read again"
    calls.clear()
    view.flags.writeable = False
    assert [mean(view), mean(view), len(calls)] == [7, 7, 1]
    alive = weakref.ref(view)
    del view
    assert alive() is None
    other = np.full((4, 4, 3), 9, np.uint8)  # may have its address
    other.flags.writeable = False
    assert mean(other) == 9
