"""Placement on real clusters: groups, devices, and messages about what does not fit."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run_on_nodes(tmp_path: Path, nodes: list[dict[str, float]], body: str) -> Any:
    """The `result` of `body` in a driver process of its own, on a cluster of these Ray nodes."""
    script = f"""
    import json, os
    import ray
    from ray.cluster_utils import Cluster
    nodes, small = {nodes!r}, {{"object_store_memory": 100_000_000}}
    cluster = Cluster(initialize_head=True, head_node_args=dict(nodes[0], **small, include_dashboard=False))
    for node in nodes[1:]:
        cluster.add_node(**node, **small)
    os.environ["RAY_ADDRESS"] = cluster.address
    from pixelis.actors import cluster as actors_cluster, placement, reservations
    from pixelis.config import load
    def config(*overrides):
        return load(None, ["cluster.placement_timeout_s=8", "telemetry.progress=false", "run.dir={tmp_path}", *overrides])
    actors_cluster.connect(config())
    try:
{textwrap.indent(textwrap.dedent(body), "        ")}
    finally:
        ray.shutdown()
        cluster.shutdown()
    print("RESULT", json.dumps(result))
    """
    # The embedded lines are already indented for the block that they are in.
    script = "\n".join(line[4:] if line.startswith("    ") else line for line in script.splitlines())
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, run.stdout[-2000:] + run.stderr[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


@pytest.mark.long  # 80 s of a cluster of two nodes
def test_groups_devices_and_messages_on_two_nodes(tmp_path: Path) -> None:
    """Two nodes with two (imaginary) GPUs each: every check shares the start of the cluster."""
    result = run_on_nodes(
        tmp_path,
        [{"num_cpus": 4, "num_gpus": 2}, {"num_cpus": 4, "num_gpus": 2}],
        """
        import ray
        from ray.util.placement_group import placement_group_table
        from pixelis.errors import InfraFailure

        @ray.remote
        class Probe:
            def __init__(self):
                self.ids = actors_cluster.use_reserved_gpus()
            def devices(self):
                return self.ids, os.environ["CUDA_VISIBLE_DEVICES"], ray.get_runtime_context().get_node_id()
            def child(self):
                self.probe = Probe.options(num_cpus=0.25, num_gpus=0).remote()
                return ray.get(self.probe.devices.remote())

        result = {}
        # Generators of 1 GPU with two toolboxes each: one GPU for each, and the toolboxes on their node without one.
        settings = config("engine.cpus=1", "engine.gpus=1", "toolbox.workers=2")
        bundles = reservations.generator_bundles(settings)
        groups = {f"generator {i}": reservations.reserve(bundles) for i in range(3)}
        reservations.wait_reserved(groups, 20)
        probes = [Probe.options(**reservations.inside(g, children=True)).remote() for g in groups.values()]
        result["generators"] = ray.get([p.devices.remote() for p in probes])
        result["toolboxes"] = ray.get([p.child.remote() for p in probes])
        result["nodes_of_groups"] = [len(set(placement_group_table(g)["bundles_to_node_id"].values())) for g in groups.values()]
        result["without"] = ray.get(Probe.options(num_cpus=0).remote().devices.remote())[:2]

        # One more does not fit: there are GPUs, but none with three CPUs beside it.
        more = reservations.reserve([{"CPU": 3.0, "GPU": 1.0}], name="extra")
        try:
            reservations.wait_reserved({"generator 3": more}, 1)
        except InfraFailure as error:
            result["late"] = str(error)
        reservations.release(more)
        try:
            reservations.preflight(config("engine.gpus=3", "engine.tensor_parallel=3"), learner=False, rollouts=True)
        except InfraFailure as error:
            result["too_large"] = str(error)
        for probe, group in zip(probes, groups.values()):
            ray.kill(probe)
            reservations.release(group)

        batch = ("rft.prompts_per_step=6", "sft.batch=6")
        for name, workers in (("fits one node", 2), ("needs two nodes", 3)):
            learners = config("learner.gpus=1", f"learner.workers={workers}", *batch)
            with reservations.requested_learners(learners) as (groups, room):
                reservations.wait_reserved(groups, 8)
                result[name] = room.strategy

        # The group of an actor that was killed outlives it; the next one of its name replaces it.
        @ray.remote(num_cpus=0)
        class System:
            def start(self):
                self.group = reservations.reserve([{"CPU": 3.0}], name="serve-generator-0")
                return self.group.wait(10)
        result["restarts"] = []
        for _ in range(2):
            system = System.remote()
            result["restarts"].append(ray.get(system.start.remote()))
            ray.kill(system)
        alive = [g for g in placement_group_table().values() if g["name"] == "serve-generator-0" and g["state"] != "REMOVED"]
        result["groups_left"] = len(alive)
        reservations.release(ray.util.get_placement_group("serve-generator-0"))

        # Colocated: each of two generators shares its GPU with one learner.
        shared = config("engine.gpus=1", "learner.gpus=1", "engine.colocate=true", "engine.workers=2", "learner.workers=2")
        groups = [reservations.reserve(reservations.generator_bundles(shared), name=f"job-generator-{i}") for i in range(2)]
        reservations.wait_reserved({str(i): group for i, group in enumerate(groups)}, 20)
        groups.append(reservations._reserve_learners(shared, 2, "job")[0])
        reservations.wait_reserved({str(i): group for i, group in enumerate(groups)}, 20)
        places = [(groups[0], 0), (groups[1], 0), (groups[2], 0), (groups[2], 1)]
        probes = [Probe.options(**reservations.inside(group, index)).remote() for group, index in places]
        result["shared"] = ray.get([p.devices.remote() for p in probes])
        for group in groups:
            reservations.release(group)

        result["what is left"] = reservations.fitting_learners(config("learner.gpus=1"), (8, 4, 2), 2)[:2]

        # A job that does not fit asks for its learners and generators at once: an autoscaler adds all nodes together.
        import threading
        def start():
            large = config("learner.gpus=2", "learner.workers=3", "engine.gpus=2", "engine.workers=3", "cluster.autoscaling=true",
                           "policy.model=nano", *batch)
            try:
                with placement.placed(large):
                    pass
            except InfraFailure as error:
                result["gang"] = str(error)
        thread = threading.Thread(target=start)
        thread.start()
        result["requested"] = []
        while thread.is_alive() and len(result["requested"]) < 2:
            waiting = [g["bundles"] for g in placement_group_table().values() if g["state"] == "PENDING"]
            result["requested"] = sorted(sum(b.get("GPU", 0) for b in bundles.values()) for bundles in waiting)
            thread.join(0.2)
        thread.join()
        """,
    )
    ids = [(*ids, node) for ids, _, node in result["generators"]]
    assert len(set(ids)) == 3
    assert all(visible == ids[0] for ids, visible, _ in result["generators"]), (
        "a generator sees the GPU that it reserved"
    )
    assert [node for *_, node in result["generators"]] == [node for *_, node in result["toolboxes"]]
    assert {visible for _, visible, _ in result["toolboxes"]} == {""}, (
        "a process without a reservation sees no GPU"
    )
    assert result["without"] == [[], ""]
    assert result["nodes_of_groups"] == [1, 1, 1]
    assert "generator 3 does not fit: it needs CPU 3, GPU 1" in result["late"]
    assert "free in all of them: CPU 3.5, GPU 1" in result["late"]
    assert "a generator with its toolboxes needs CPU 0.75, GPU 3 on one node" in result["too_large"]
    assert (result["fits one node"], result["needs two nodes"]) == ("STRICT_PACK", "PACK")
    assert (result["restarts"], result["groups_left"]) == ([True] * 2, 1)
    gpus = [(*ids, node) for ids, _, node in result["shared"]]
    assert sorted(gpus[:2]) == sorted(gpus[2:])
    assert len(set(gpus)) == 2
    assert result["what is left"] == [4, "PACK"]
    assert result["requested"] == [2, 6]  # two of the three generators fit
    assert "the group of 3 learners does not fit: it needs" in result["gang"]
