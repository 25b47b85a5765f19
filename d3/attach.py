"""The `attach` transport: an endpoint that D3 did not start. There is no process and no boot, only requests."""

import os
from pathlib import Path

import httpx

from d3.engine import EngineFailure
from d3.record import BootPlan, EngineFacts, Failure, Phases
from d3.server import ServerEngine


class AttachedEngine(ServerEngine):
    """A running endpoint, asked as it is. Its key comes out of the environment and goes into no record."""

    def __init__(self, plan: BootPlan, log: Path) -> None:
        self.plan = plan
        self.log = log
        self.phases = Phases()
        key = os.environ.get(plan.launch.key_env, "") if plan.launch.key_env else ""
        self.hidden = (key,) if key else ()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url, timeout = plan.launch.url or "", plan.launch.request_timeout_s
        self.http = httpx.Client(base_url=url, timeout=timeout, trust_env=False, headers=headers)

    def start(self) -> EngineFacts:
        """Read what the endpoint says of itself; it must be ready now."""
        launch = self.plan.launch
        if launch.key_env and not self.hidden:
            line = f"the environment has no {launch.key_env}, which engine.key_env names"
            raise EngineFailure(Failure(stage="launch", kind="environment", line=line))
        if not self._healthy():
            line = (
                f"nothing ready answers at {launch.url}{launch.health}; start it, or name its page with engine.health"
            )
            raise EngineFailure(Failure(stage="boot", kind="environment", line=line))
        return self._facts()

    def stop(self) -> tuple[str, ...]:
        """Close the connection; the endpoint goes on."""
        self.http.close()
        return ()

    def _ended(self) -> Failure | None:
        return None
