"""Runs the migrations of one schema; the same file for every service (see `berth.store.migrate`).

Everything made belongs to the service's role, and the version table lies in the service's schema.
"""

from alembic import context
from sqlalchemy import text

schema = context.config.attributes["schema"]
role = context.config.attributes["role"]
options = {"version_table": "alembic_version", "version_table_schema": schema, "transaction_per_migration": False}

if context.is_offline_mode():
    context.configure(dialect_name="postgresql", literal_binds=True, **options)
    with context.begin_transaction():
        context.execute(f"SET LOCAL ROLE {role}")
        context.execute(f"SET LOCAL search_path = {schema}")
        context.run_migrations()
else:
    connection = context.config.attributes["connection"]
    context.configure(connection=connection, **options)
    with connection.begin():
        connection.execute(text(f"SET LOCAL ROLE {role}"))
        connection.execute(text(f"SET LOCAL search_path = {schema}"))
        with context.begin_transaction():
            context.run_migrations()
