class NVRTCError(RuntimeError):
    pass


def getVersion():
    return 13, 0
