"""HTTP: connections and their limits, request bodies, routes, answers, metrics, the OpenAPI document."""
