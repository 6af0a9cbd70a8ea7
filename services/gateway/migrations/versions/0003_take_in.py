"""One call for a group of requests: keys, jobs, secrets, cancel marks and outbox, in one round trip and one transaction."""

from alembic import op

from berth.store.common_v1 import COMMIT_PARAMETERS

revision = "0003"
down_revision = "0002"

_TO_COMMIT = {
    "out_event_ids": "event_ids",
    "out_subjects": "subjects",
    "out_headers": "headers",
    "out_payloads": "payloads",
    "published": "p_published",
}


def upgrade() -> None:
    arguments = ", ".join(f"p_{name} => {_TO_COMMIT.get(name, 'NULL')}" for name, _ in COMMIT_PARAMETERS)
    op.execute(_TAKE_IN.replace("{arguments}", arguments))


# p_*_subs number the submissions of the group from 1; what belongs to one whose key is known already is left out.
# p_out_subs: 0: always; -1: with the cancel mark of p_out_entities.
_TAKE_IN = """
CREATE FUNCTION gateway.take_in(
    p_key_subs integer[], p_scopes text[], p_keys text[], p_digests bytea[], p_expires_at timestamptz[],
    p_job_subs integer[], p_job_ids text[], p_tenants text[], p_names text[], p_classes text[], p_priorities integer[],
    p_gpus bigint[], p_workers integer[], p_submitted_at timestamptz[], p_submitted_by text[], p_trace_ids text[],
    p_specs bytea[],
    p_secret_subs integer[], p_secret_jobs text[], p_secret_names text[], p_secret_values text[],
    p_cancels text[],
    p_out_subs integer[], p_out_entities text[], p_out_event_ids text[], p_out_subjects text[], p_out_headers bytea[],
    p_out_payloads bytea[], p_published bigint[],
    OUT lost integer[], OUT cancelled text[], OUT ids bigint[]
) LANGUAGE plpgsql AS $berth$
DECLARE
    event_ids text[];
    subjects text[];
    headers bytea[];
    payloads bytea[];
BEGIN
    lost := '{}';
    cancelled := '{}';
    IF p_key_subs IS NOT NULL THEN
        -- In one order everywhere, so that two groups wait for each other but never in a circle. An expired key is free
        -- again; our own row, from a commit whose answer was lost, counts as won.
        WITH asked AS (
            SELECT k.sub, k.scope, k.key, k.digest, k.expires_at, (
                SELECT array_agg(j.id ORDER BY j.id) FROM unnest(p_job_subs, p_job_ids) AS j (sub, id) WHERE j.sub = k.sub
            ) AS job_ids
            FROM unnest(p_key_subs, p_scopes, p_keys, p_digests, p_expires_at) AS k (sub, scope, key, digest, expires_at)
        ), kept AS (
            INSERT INTO gateway.idempotency AS i (scope, key, digest, job_ids, expires_at)
            SELECT a.scope, a.key, a.digest, a.job_ids, a.expires_at FROM asked a ORDER BY a.scope, a.key
            ON CONFLICT (scope, key) DO UPDATE
            SET digest = excluded.digest, job_ids = excluded.job_ids, expires_at = excluded.expires_at
            WHERE i.expires_at <= now() OR (i.digest = excluded.digest AND i.job_ids = excluded.job_ids)
            RETURNING i.scope, i.key
        )
        SELECT coalesce(array_agg(a.sub), '{}') INTO lost FROM asked a
        WHERE NOT EXISTS (SELECT FROM kept WHERE kept.scope = a.scope AND kept.key = a.key);
    END IF;
    IF p_job_ids IS NOT NULL THEN
        INSERT INTO gateway.job (job_id, tenant, name, class, state, priority, gpus, workers, submitted_at, submitted_by,
            trace_id, spec)
        SELECT j.id, j.tenant, j.name, j.class, 'submitted', j.priority, j.gpus, j.workers, j.submitted_at,
            j.submitted_by, j.trace_id, j.spec
        FROM unnest(p_job_subs, p_job_ids, p_tenants, p_names, p_classes, p_priorities, p_gpus, p_workers,
            p_submitted_at, p_submitted_by, p_trace_ids, p_specs)
            AS j (sub, id, tenant, name, class, priority, gpus, workers, submitted_at, submitted_by, trace_id, spec)
        WHERE NOT j.sub = ANY (lost)
        ON CONFLICT (job_id) DO NOTHING;
    END IF;
    IF p_secret_jobs IS NOT NULL THEN
        INSERT INTO gateway.secret (job_id, name, value)
        SELECT s.job_id, s.name, s.value
        FROM unnest(p_secret_subs, p_secret_jobs, p_secret_names, p_secret_values) AS s (sub, job_id, name, value)
        WHERE NOT s.sub = ANY (lost)
        ON CONFLICT DO NOTHING;
    END IF;
    IF p_cancels IS NOT NULL THEN
        WITH marked AS (
            UPDATE gateway.job j SET cancel_requested = true
            WHERE j.job_id = ANY (p_cancels) AND NOT j.cancel_requested AND NOT j.is_final
            RETURNING j.job_id
        )
        SELECT coalesce(array_agg(marked.job_id), '{}') INTO cancelled FROM marked;
    END IF;
    IF p_out_event_ids IS NOT NULL THEN
        SELECT array_agg(o.event_id ORDER BY o.n), array_agg(o.subject ORDER BY o.n), array_agg(o.header ORDER BY o.n),
            array_agg(o.payload ORDER BY o.n)
        INTO event_ids, subjects, headers, payloads
        FROM unnest(p_out_subs, p_out_entities, p_out_event_ids, p_out_subjects, p_out_headers, p_out_payloads)
            WITH ORDINALITY AS o (sub, entity, event_id, subject, header, payload, n)
        WHERE o.sub = 0 OR (o.sub > 0 AND NOT o.sub = ANY (lost)) OR (o.sub < 0 AND o.entity = ANY (cancelled));
    END IF;
    IF event_ids IS NOT NULL OR p_published IS NOT NULL THEN
        ids := gateway.berth_commit({arguments});
    END IF;
    ids := coalesce(ids, '{}');
END
$berth$
"""
