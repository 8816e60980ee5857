"""Scheduling: which task runs next and where: admission, fair shares, placement, grouping, deadlines."""
