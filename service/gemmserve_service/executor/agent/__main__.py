"""`python -m gemmserve_service.executor.agent`: the agent of one of a node's devices, whose parent is the command."""

from __future__ import annotations

from gemmserve_service.executor.agent.process import run
from gemmserve_service.runtime.handoff import AgentHandoff

if __name__ == "__main__":
    raise SystemExit(run(AgentHandoff.receive()))
