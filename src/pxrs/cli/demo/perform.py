"""The demo from curtain to curtain: a store, a topic, a ledger; the scenes; the check."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import NamedTuple

import msgspec

from pxrs.app import Pxrs, connect
from pxrs.cli.demo.cast import Cast, DemoFailed
from pxrs.cli.demo.check import Findings, check
from pxrs.cli.demo.ledger import Ledger, make_ledger
from pxrs.cli.demo.observer import Observer
from pxrs.cli.demo.scenes import SCENES, Figures, Pace, drain, not_reached
from pxrs.cli.demo.script import KEYS, PARTITIONS
from pxrs.cli.demo.stage import NotShown, Proof, Stage, View
from pxrs.config import parse_url, public, split_url
from pxrs.core.records import claims_prefix, head_key, history_prefix
from pxrs.errors import InvalidRequest
from pxrs.types import Delete, Topic


class Plan(NamedTuple):
    """Where, how, and how long."""

    engine: str | None
    transactions: bool
    pace: Pace


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What was shown. `proved` if all of it held."""

    proved: bool
    effectively_once: bool
    proofs: list[Proof]
    figures: Figures
    ledger: Findings | None


def perform(plan: Plan, view: View) -> Outcome:
    """Run it all. What fails is told in the outcome; nothing is left behind."""
    with (
        tempfile.TemporaryDirectory(prefix="pxrs-demo-") as folder,
        _store(plan.engine, folder) as px,
        _topic(px) as topic,
        _ledger(px, topic.name, folder, transactions=plan.transactions) as ledger,
        Cast(px.url) as cast,
    ):
        group = topic.name
        observer = Observer(px, topic, group)
        arguments = {
            "produce": (topic.name, str(plan.pace.round)),
            "consume": (topic.name, group, ledger.address),
        }
        view.open(public(px.url), once=ledger.once)
        try:
            with closing(Stage(cast, observer, view, arguments)) as stage:
                return _play(stage, observer, ledger, view, plan.pace)
        finally:
            view.close()


def _play(stage: Stage, observer: Observer, ledger: Ledger, view: View, pace: Pace) -> Outcome:
    proofs: list[Proof] = []
    figures = Figures()
    findings: Findings | None = None

    def note(proof: Proof) -> None:
        proofs.append(proof)
        view.proof(proof)

    for number, scene in enumerate(SCENES):
        stage.begin(f"{number + 1}/{len(SCENES)}  {scene.title}")
        try:
            note(Proof(scene.name, *scene.play(stage, figures, pace)))
        except (NotShown, DemoFailed) as error:
            note(Proof(scene.name, False, f"not proved: {scene.promise} ({error})"))
            proofs += not_reached(SCENES[number + 1 :])
            break
    else:
        try:
            stage.begin("checking every message")
            drain(stage)
            view.close()
            findings = check(ledger.entries(), stage.sent, once=ledger.once)
            for proof in _judge(findings, observer, stage.sent, once=ledger.once):
                note(proof)
        except (NotShown, DemoFailed) as error:
            note(Proof("drained", False, f"not proved: everything is handled ({error})"))
            proofs += not_reached(())
    figures.seconds, figures.messages = round(stage.seconds, 3), stage.sent
    return Outcome(
        proved=all(proof.holds for proof in proofs),
        effectively_once=ledger.once,
        proofs=proofs,
        figures=figures,
        ledger=findings,
    )


def _judge(findings: Findings, observer: Observer, sent: int, *, once: bool) -> list[Proof]:
    complete = findings.lost == findings.unknown == 0 and not (once and findings.repeated)
    often = "once" if once else "at least once"
    return [
        Proof(
            "complete",
            complete,
            f"every message is in the ledger {often}: {sent:,} sent, "
            f"{findings.lost:,} lost, {findings.repeated:,} repeated",
        ),
        Proof(
            "ordered",
            findings.out_of_order == 0,
            f"order is kept for each of {KEYS} keys: {findings.out_of_order:,} out of order",
        ),
        Proof(
            "forward",
            observer.went_back == 0,
            f"no checkpoint and no epoch went back: {observer.looks:,} looks, "
            f"{observer.went_back:,} steps back",
        ),
    ]


@contextmanager
def _store(engine: str | None, folder: str) -> Iterator[Pxrs]:
    """What the engine does not keep (etcd: messages, NATS: groups) is in a file for the while."""
    file = f"sqlite:///{folder}/demo.db"
    parts = split_url(engine or file)
    if any(parse_url(place).scheme == "memory" for place in parts.urls()):
        raise InvalidRequest(
            f"the demo runs in several processes, {engine} lives in one; "
            "leave --engine out, or name a file: sqlite:///demo.db"
        )
    with connect(str(parts.completed(file))) as px:
        yield px


@contextmanager
def _topic(px: Pxrs) -> Iterator[Topic]:
    """A topic, and a group of the same name; nothing is left of either."""
    topic = px.create_topic(f"demo-{secrets.token_hex(4)}", PARTITIONS)
    try:
        yield topic
    finally:
        px.delete_topic(topic.name)
        coord = px.stores.coord
        for prefix in (claims_prefix(topic.name), history_prefix(topic.name)):
            for record in coord.list(prefix):
                coord.commit([], [Delete(record.key)])
        coord.commit([], [Delete(head_key(topic.name))])


@contextmanager
def _ledger(px: Pxrs, name: str, folder: str, *, transactions: bool) -> Iterator[Ledger]:
    ledger = make_ledger(px, name.replace("-", "_"), folder, transactions=transactions)
    try:
        yield ledger
    finally:
        ledger.remove()
