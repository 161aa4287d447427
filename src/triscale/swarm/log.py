"""The event log of a swarm run, and the exact data fields of each event kind.

A run is a directory: ``events.jsonl`` (this log), ``run.json`` (what is needed to resume), ``workspace/`` (files of
the tools), ``traces.jsonl`` (token ids and log-probabilities, only with clients that fill them), ``report/``.

**Ids.** The orchestrator's run has the id ``main``. An assignment has a task id, which is also the id of the
sub-agent's run: ``t2.0`` is the first assignment of the orchestrator's turn 2, ``t2.0/t1.3`` the fourth of that
sub-agent's turn 1 (only with depth > 1). The model call of turn s of run r is ``r#s``; its tool calls are ``r#s.i``
in the order of the reply. Ids depend only on this structure, so a resumed run gives the same ids to the same things.
``span`` of an event is the id it is about and ``parent`` the enclosing one:

    run name -> main -> main#1 (model call) ; main -> main#1.0 (tool call) -> t1.0 (assignment) -> t1.0#1 ...

**Tokens, cost and seconds** are on ``model.reply`` alone (the leaves); every total is derived by summing them. The
totals that ``task.end`` and ``result`` repeat are for people and for checks.

**Resume.** ``swarm.resume`` starts another session of the same log. What was recorded is replayed without new events.
A ``model.call`` or ``tool.call`` without its reply was lost in the crash and appears again under the same id; a
``task.end`` that appears again replaces the earlier one (a task that had not completed was continued).

Event kinds and their data (``?`` = may be missing or null):

``swarm.start``  task (the question), limits (resolved, a dict), mode ("swarm" | "single"), system_prompt, agent
    ("main"), models {orchestrator, subagent: {name, endpoint, context_window?}}, tools [names], counting ("turns" |
    "calls": how steps are counted), virtual (bool: virtual clock), world?
``swarm.resume``  session (2, 3, ...), spent {tokens_in, tokens_out, tokens_cached, cost}, limits
``agent.create``  agent (= name), name, system_prompt, owner (run id of the creator), turn, call, replaces (bool)
``task.assign``  task, agent (name of the created agent), prompt, owner (run id of the parent), turn, index (in the
    turn's batch), call (the tool call's id), depth (1 = child of main)
``task.start``  task, agent, attempt (1, or more after a resume), queue_seconds (waited for a slot)
``task.end``  task, agent, outcome (:class:`~triscale.swarm.types.Outcome`), reason ("" when completed), limit? (name
    of the limit), seconds (run time), queue_seconds (waiting: for a slot, and for the rate limiter), steps,
    critical_steps, tokens_in, tokens_out, tokens_cached, cost (own model calls), total_tokens (with descendants),
    result (full final or partial text), handle ("result:" + task), delivered (characters shown to the parent; null
    if it had none)
``model.call``  call, agent (run id), step, model, endpoint, messages (how many), tools (how many)
``model.reply``  call, agent, step, outcome ("completed" or why not), reason, tokens_in, tokens_out, tokens_cached,
    cost, seconds (of the attempt that counted), queue_seconds (waiting for the rate limiter and between attempts),
    attempts, model, finish_reason, content, reasoning?, tool_calls [{id, name, arguments}], trace? {file, offset},
    retries [{kind, message, seconds}] (what the earlier attempts died of)
``tool.call``  call, agent, step, index, name, arguments (string as the model wrote it), tool_call_id
``tool.result``  call, agent, name, outcome, reason, seconds, content (exactly what the model is shown), chars (of the
    whole result), truncated (bool), handle? ("result:" + call, when truncated or an assignment), full? (whole text
    when truncated and not an assignment), evidence [ids], data {}, task? (for assign_task)
``stage``  agent (run id), turn, main_steps, sub_steps [one per assignment], critical_steps (of this stage)
``limit``  limit (name), value, used, scope (run id, or "run"), message
``limiter``  endpoint, event ("shrink" | "grow" | "pause" | "closed"), capacity, reason, seconds?
``warning``  message
``result``  outcome, reason, limit?, text (the final or best partial answer), seconds, steps, critical_steps,
    tokens_in, tokens_out, tokens_cached, cost, outcomes {outcome: count of assignments}, resume (command, "" if done)
"""
