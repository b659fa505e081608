-- What a worker records when it starts.

-- name: subscribe_handlers
-- One round trip for many handlers: those of a large application took most of its first start. The arrays run in parallel,
-- with an entry for each handler and event type. In the order of names, so that workers that start together never wait for
-- each other in a circle; the order of the aggregate is that of its input.
SELECT pg_catalog.count(core.subscribe(s.domain_context, s.handler, s.event_types)::text)
FROM (SELECT t.domain_context, t.handler, pg_catalog.array_agg(t.event_type) AS event_types
      FROM unnest(:domain_contexts::text[], :handlers::text[], :event_types::text[])
           AS t (domain_context, handler, event_type)
      GROUP BY t.handler, t.domain_context ORDER BY t.handler OFFSET 0) s
