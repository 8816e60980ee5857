"""Transfer processes: they move the bytes of large bodies between a connection and an extent, and nothing else.

`protocol` is what front and mover say to each other, `process` the mover, `pool` the front's side.
"""
