from cupy.cuda import runtime


class Device:
    def __init__(self, device=0):
        self.id = int(device)

    def __int__(self):
        return self.id

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def __eq__(self, other):
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self):
        return self.id

    def use(self):
        pass

    def synchronize(self):
        runtime._wait()


def get_cublas_handle():
    return 0xB1A5
