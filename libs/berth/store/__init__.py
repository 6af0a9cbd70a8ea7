"""State of the services in PostgreSQL: tables, migrations, batch transactions, leadership, parked messages.

Import from the modules: `database` (connections), `batch` (exactly once in effect), `leader`, `parked`, `migrate`,
`tables`.
"""
