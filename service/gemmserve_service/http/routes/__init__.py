"""Routes parse, call the core and render; what the core is asked is in `gemmserve_service.jobs.core`."""
