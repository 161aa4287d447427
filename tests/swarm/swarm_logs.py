"""Hand-made event logs for tests of the ledger, and a runner of whole worlds in virtual time."""

from __future__ import annotations

import itertools
from pathlib import Path

from triscale.events import Event
from triscale.swarm import clock
from triscale.swarm.ledger import Ledger
from triscale.swarm.limits import Limits
from triscale.swarm.orchestrator import Swarm
from triscale.swarm.worlds import make_world


class Log:
    """Builds events in order; ``at`` sets the clock, every other method appends one event."""

    def __init__(self, task="find it", mode="swarm", counting="turns", **limits):
        self.time, self.events = 0.0, []
        models = {role: {"name": f"m-{role}", "endpoint": "e"} for role in ("orchestrator", "subagent")}
        self.add(
            "swarm.start", task=task, limits={"concurrent": 100, **limits}, mode=mode, counting=counting, models=models
        )

    def add(self, kind, **data):
        self.events.append(Event(time=self.time, run="r", kind=kind, data=data))
        return self

    def at(self, time):
        self.time = time
        return self

    def model(self, agent, step, seconds=1.0, calls=(), tokens=(10, 5, 0), cost=0.0, outcome="completed", content=""):
        """A model call that starts now and takes ``seconds``; calls: [(name, arguments)]."""
        id = f"{agent}#{step}"
        opening = {"opening": [{"role": "user", "content": "find it"}]} if step == 1 else {}
        self.add("model.call", call=id, agent=agent, step=step, model="m", endpoint="e", **opening)
        self.time += seconds
        made = [{"id": f"{id}.{i}", "name": n, "arguments": a} for i, (n, a) in enumerate(calls)]
        return self.add("model.reply", call=id, agent=agent, step=step, outcome=outcome, reason="", tokens_in=tokens[0],
                        tokens_out=tokens[1], tokens_cached=tokens[2], cost=cost, seconds=seconds, queue_seconds=0.0,
                        attempts=1, finish_reason="stop", content=content, tool_calls=made)  # fmt: skip

    def tool(
        self, agent, step, index, name="search", seconds=1.0, content="", outcome="completed", evidence=(), **more
    ):
        id = f"{agent}#{step}.{index}"
        self.add("tool.call", call=id, agent=agent, step=step, index=index, name=name, arguments="{}", tool_call_id=id)
        self.time += seconds
        return self.add("tool.result", call=id, agent=agent, name=name, outcome=outcome, seconds=seconds, reason="",
                        content=content, chars=len(content), truncated=False, evidence=list(evidence),
                        **more)  # fmt: skip

    def assign(self, task, turn, index, owner="main", agent="a", prompt="", depth=1):
        return self.add("task.assign", task=task, agent=agent, prompt=prompt, owner=owner, turn=turn, index=index,
                        call=f"{owner}#{turn}.{index}", depth=depth)  # fmt: skip

    def start(self, task, attempt=1):
        return self.add("task.start", task=task, agent="a", attempt=attempt, queue_seconds=0.0)

    def end(self, task, outcome="completed", steps=1, result="", seconds=1.0, reason="", **more):
        return self.add("task.end", task=task, agent="a", outcome=outcome, reason=reason, seconds=seconds, steps=steps,
                        critical_steps=steps, queue_seconds=0.0, result=result, **more)  # fmt: skip

    def result(self, text="done", outcome="completed", reason=""):
        return self.add("result", outcome=outcome, reason=reason, text=text, steps=1, critical_steps=1)

    def ledger(self):
        return Ledger(self.events)


_numbers = itertools.count()


def run_world(spec: str, folder: Path, mode="swarm", **limits):
    """(world, result, ledger) of one run of a world's scripted agents under the virtual clock."""
    world = make_world(spec)
    directory = folder / f"run{next(_numbers)}"
    swarm = Swarm(
        client=world.scripted("orchestrator" if mode == "swarm" else "single"),
        subagent_client=world.scripted("subagent"), tools=world.tools, directory=directory, mode=mode, world=spec,
        limits=Limits(**{"orchestrator_steps": 10_000, **limits}),
    )  # fmt: skip
    result = clock.run(swarm.run(world.question), virtual=True)
    return world, result, Ledger.of_run(directory)
