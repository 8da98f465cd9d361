"""A leader that was suspended and then continues: it writes nothing more."""

import asyncio
import time

from kubeapi import kube_api
from kubekinds import Widget, widget
from waiting import until

from accelplane.kube.client import Client
from accelplane.kube.leader import Election, LeaseLost
from accelplane.kube.manager import OFF, Manager
from accelplane.kube.objects import Request


async def test_a_leader_suspended_during_its_work_ends_at_its_next_write() -> None:
    codes: list[int] = []
    refused: list[str] = []
    async with kube_api() as api:
        client = Client(api.config, field_manager="test", timeout=1)
        election = Election(
            name="l", namespace="n", identity="one", lease_duration=2, renew_deadline=1, retry_period=0.05
        )
        manager = Manager(client, election=election, health_address=OFF, metrics_address=OFF, end=codes.append)

        async def reconcile(request: Request) -> None:
            await client.patch(Widget, request.name, {"spec": {"size": 1}})
            # As a stopped process or a sleeping machine.
            time.sleep(1.1)  # noqa: ASYNC251
            try:
                await client.patch(Widget, request.name, {"spec": {"size": 2}})
            except LeaseLost as error:
                refused.append(str(error))
                raise

        manager.controller("widget", reconcile).for_object(manager.cache(Widget))
        api.put("widgets", widget("w"))
        running = asyncio.create_task(manager.run())
        await until(lambda: bool(codes))
        assert refused == ["lease n/l: lost by one: not renewed for 1 s"]
        assert codes[0] == 1
        found = api.get("widgets", "w")
        assert found
        assert found["spec"]["size"] == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.close()
