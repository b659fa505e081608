"""What can happen to the servers of a broker, and between them and the workers."""

import random

from chaos.nemeses import Blow, Nemesis
from chaos.world import World


class _BrokerNemesis(Nemesis):
    """A fault of servers. It hits every worker: what the broker is not told is delivered again."""

    async def heal(self, world: World) -> None:
        await world.around.heal()


class KillBroker(_BrokerNemesis):
    name, promise = "kill_broker", "SCL-2, P1: SIGKILL of a broker's servers loses nothing that was confirmed"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        nodes = rng.sample(world.around.nodes, min(rng.choice((1, 1, 2)), len(world.around.nodes)))
        world.around.kill(nodes)
        return Blow(rng.uniform(0.0, 3.0), {"nodes": [world.around.nodes.index(node) for node in nodes]})


class KillLeader(_BrokerNemesis):
    name, promise = "kill_leader", "SCL-2, P1: another server of the broker takes over, with everything confirmed"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        leader = await world.around.leader()
        world.around.kill([leader])
        return Blow(rng.uniform(0.0, 1.0), {"node": world.around.nodes.index(leader)})


class FreezeBroker(_BrokerNemesis):
    name, promise = "freeze_broker", "SCL-2: a server of the broker that answers nobody (SIGSTOP) is an outage, no loss"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        node = rng.choice(world.around.nodes) if rng.random() < 0.5 else await world.around.leader()
        world.around.freeze(node)
        return Blow(rng.uniform(0.5, 2.0) * world.setup.lease, {"node": world.around.nodes.index(node)})


class PromoteReplica(_BrokerNemesis):
    name, promise = "promote_replica", "SCL-2, P1: a replica that is promoted has everything that was confirmed"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        await world.around.promote()
        return Blow(rng.uniform(0.0, 3.0))


class CutReplication(Nemesis):
    name, promise = "cut_replication", "SCL-2: nothing is confirmed that the replica does not have"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        frozen = world.around.replication.freeze(swallow=True)
        return Blow(rng.uniform(0.5, 4.0), {"frozen": frozen})

    async def heal(self, world: World) -> None:
        world.around.replication.heal()


class _LineNemesis(Nemesis):
    async def heal(self, world: World) -> None:
        for line in world.around.lines:
            line.heal()


class CutBroker(_LineNemesis):
    name, promise = "cut_broker", "SCL-2, P1: connections to the broker that are reset in the middle of anything"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        refuse = rng.random() < 0.5
        cut = sum(line.refuse() if refuse else line.cut() for line in world.around.lines)
        return Blow(rng.uniform(0.5, 4.0) if refuse else 0.0, {"cut": cut, "refused": refuse})


class LoseBrokerAnswers(_LineNemesis):
    name, promise = "lose_broker_answers", "P1, P2: the broker has stored or forgotten it, and nobody was told"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        return Blow(rng.uniform(0.1, 2.0), {"muted": sum(line.mute() for line in world.around.lines)})


class PartitionBroker(_LineNemesis):
    name, promise = "partition_broker", "SCL-2: servers of the broker that swallow everything, some of them or all"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        lines = rng.sample(world.around.lines, rng.randint(1, len(world.around.lines)))
        frozen = sum(line.freeze(swallow=True) for line in lines)
        return Blow(rng.uniform(1.0, 6.0), {"lines": len(lines), "frozen": frozen})
