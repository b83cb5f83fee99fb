"""Table of runs in the storage: the fingerprint and lease of each run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlalchemy import Engine, Table

RUN_TABLE = "neural_mp_runs"


@cache
def _build_run_table() -> Table:
    import sqlalchemy as sql

    return sql.Table(
        RUN_TABLE,
        sql.MetaData(),
        sql.Column("run_id", sql.Integer, primary_key=True),
        sql.Column("name", sql.String(512), nullable=False, unique=True),
        sql.Column("fingerprint", sql.Text),
        sql.Column("lease", sql.Text),
    )


def create_run_table(engine: Engine) -> None:
    """Create the table if it does not exist."""
    from sqlalchemy.schema import CreateTable

    with engine.begin() as connection:
        connection.execute(CreateTable(_build_run_table(), if_not_exists=True))


def run_rows(engine: Engine, prefix: str = "") -> list[tuple[str, Any]]:
    """Return name and fingerprint of runs whose names start with `prefix`, oldest first."""
    import sqlalchemy as sql

    columns = _build_run_table().c
    query = sql.select(columns.name, columns.fingerprint).order_by(columns.run_id)
    if prefix:
        query = query.where(columns.name.startswith(prefix, autoescape=True))
    with engine.connect() as connection:
        return [(str(name), about) for name, about in connection.execute(query)]


@dataclass(frozen=True)
class RunRow:
    """The row of one run.

    Attributes:
        engine: engine of the storage.
        name: name of the run.
    """

    engine: Engine
    name: str

    def insert(self, fingerprint: Mapping[str, str], lease: str) -> None:
        """Insert the row of a new run."""
        row = {"name": self.name, "fingerprint": json.dumps(dict(fingerprint)), "lease": lease}
        with self.engine.begin() as connection:
            connection.execute(_build_run_table().insert().values(row))

    def lease(self) -> str | None:
        """Return the lease; None if the run is free."""
        import sqlalchemy as sql

        columns = _build_run_table().c
        with self.engine.connect() as connection:
            query = sql.select(columns.lease).where(columns.name == self.name)
            value: str | None = connection.execute(query).scalar()
            return value

    def replace_lease(self, expected: str | None, replacement: str | None) -> bool:
        """Write the lease if it still equals `expected`; return whether it did."""
        table = _build_run_table()
        same = (table.c.name == self.name) & (table.c.lease == expected)
        with self.engine.begin() as connection:
            done = connection.execute(table.update().where(same).values(lease=replacement))
            return bool(done.rowcount)
