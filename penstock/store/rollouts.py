"""Rollouts as all gateways on one store know them, and what each of them has seen.

Documents are text here. Knows nothing of what they say.
"""

from collections.abc import Callable

from sqlalchemy import Connection, delete, select, update

from penstock.store.database import Database, insert_into
from penstock.store.schema import rollout_evidence, rollout_gateways, rollouts

_NOTHING = ""
_REMEMBERED_SECONDS = 3600.0  # of gateways that did not say that they stop


class RolloutStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self) -> list[str]:
        """Return every model's document."""
        with self._database.reading() as connection:
            found = connection.execute(select(rollouts.c.document).order_by(rollouts.c.model)).scalars()
            return [document for document in found if document != _NOTHING]

    def evidence(self, model: str, epoch: int) -> list[str]:
        """Return what all gateways have seen of a model in one epoch."""
        with self._database.reading() as connection:
            return _evidence(connection, model, epoch)

    def change(
        self,
        model: str,
        epoch: int,
        change: Callable[[str | None, list[str], float], str | None],
        *,
        gateway: str = "",
        evidence: str = "",
    ) -> str | None:
        """Change a model's document while nobody else does, and return it as it then is.

        `change` is given the document, what all gateways have seen in the epoch and the Unix time, and returns the new
        document, or None to leave it. `evidence` is what `gateway` has seen; other epochs' is forgotten.
        """
        with self._database.writing() as connection:
            document = _lock(connection, model)
            if evidence:
                _note(connection, model, epoch, gateway, evidence)
            known = None if document == _NOTHING else document
            changed = change(known, _evidence(connection, model, epoch), self._database.now(connection))
            if changed is not None:
                connection.execute(update(rollouts).where(rollouts.c.model == model).values(document=changed))
            return changed if changed is not None else known

    def announce(self, gateway: str, document: str) -> None:
        """Take what a gateway serves; nothing where it stops."""
        with self._database.writing() as connection:
            if not document:
                connection.execute(delete(rollout_gateways).where(rollout_gateways.c.gateway == gateway))
                return
            now = self._database.now(connection)
            row = insert_into(connection, rollout_gateways, {"gateway": gateway, "heard_at": now, "document": document})
            newer = {"heard_at": now, "document": document}
            connection.execute(row.on_conflict_do_update(index_elements=["gateway"], set_=newer))
            forgotten = rollout_gateways.c.heard_at < now - _REMEMBERED_SECONDS
            connection.execute(delete(rollout_gateways).where(forgotten))

    def announced(self, seconds: float) -> list[str]:
        """Return what gateways that were heard of within so many seconds serve."""
        with self._database.reading() as connection:
            since = self._database.now(connection) - seconds
            wanted = select(rollout_gateways.c.document).where(rollout_gateways.c.heard_at >= since)
            return [str(document) for document in connection.execute(wanted).scalars()]


def _lock(connection: Connection, model: str) -> str:
    """Return a model's document, and keep every other writer from it until the transaction ends."""
    wanted = select(rollouts.c.document).where(rollouts.c.model == model).with_for_update()
    document = connection.execute(wanted).scalar()
    if document is None:
        empty = insert_into(connection, rollouts, {"model": model, "document": _NOTHING})
        connection.execute(empty.on_conflict_do_nothing())
        document = connection.execute(wanted).scalar_one()
    return str(document)


def _note(connection: Connection, model: str, epoch: int, gateway: str, evidence: str) -> None:
    of_model = rollout_evidence.c.model == model
    connection.execute(delete(rollout_evidence).where(of_model, rollout_evidence.c.epoch != epoch))
    values = {"model": model, "gateway": gateway, "epoch": epoch, "document": evidence}
    row = insert_into(connection, rollout_evidence, values)
    connection.execute(
        row.on_conflict_do_update(index_elements=["model", "gateway"], set_={"epoch": epoch, "document": evidence})
    )


def _evidence(connection: Connection, model: str, epoch: int) -> list[str]:
    wanted = select(rollout_evidence.c.document).where(
        rollout_evidence.c.model == model, rollout_evidence.c.epoch == epoch
    )
    return [str(document) for document in connection.execute(wanted).scalars()]
