"""Transfer processes: they move the bytes of large bodies between a connection and an extent, and nothing else.

`protocol` is what front and transfer process say to each other, `process` the process's work, `pool` the front's side.
"""
