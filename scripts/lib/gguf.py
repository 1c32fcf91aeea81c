"""Parser of GGUF files: metadata, and tensors as f32 in the order of the file."""

import struct
from array import array

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
LOW, HIGH = (bytes(byte >> shift & 15 for byte in range(256)) for shift in (0, 4))


class Reader:
    """`values` by key, and `tensors`: name to (shape as in PyTorch, bytes of f32)."""

    def __init__(self, path):
        self.data, self.position = path.read_bytes(), 0
        magic, version, tensors, values = self.take("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"{path}: not a GGUF file of version 2 or 3")
        self.values = {self.text(): self.value(*self.take("I")) for _ in range(values)}
        infos = [(self.text(), self.take("Q" * self.take("I")[0]), *self.take("IQ")) for _ in range(tensors)]
        start = -(-self.position // 32) * 32
        self.tensors = {name: (size[::-1], self.floats(kind, size, start + at)) for name, size, kind, at in infos}

    def take(self, format):
        found = struct.unpack_from(f"<{format}", self.data, self.position)
        self.position += struct.calcsize(f"<{format}")
        return found

    def text(self):
        (length,) = self.take("Q")
        return self.take(f"{length}s")[0].decode()

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind == 9:
            inner, count = self.take("IQ")
            return [self.value(inner) for _ in range(count)]
        return self.take(SCALARS[kind])[0]

    def floats(self, kind, size, start):
        count = 1
        for extent in size:
            count *= extent
        match kind:
            case 0:  # F32
                return self.data[start : start + 4 * count]
            case 3:  # Q4_1: scale, minimum, 32 nibbles
                floats = array("f")
                for step, lowest, nibbles in struct.iter_unpack("<ee16s", self.data[start : start + count // 32 * 20]):
                    value = [step * code + lowest for code in range(16)].__getitem__
                    floats.extend(map(value, nibbles.translate(LOW)))
                    floats.extend(map(value, nibbles.translate(HIGH)))
            case 8:  # Q8_0: scale, 32 integers
                floats = array("f")
                for step, *codes in struct.iter_unpack("<e32b", self.data[start : start + count // 32 * 34]):
                    floats.extend([step * code for code in codes])
            case _:
                raise ValueError(f"tensors of type {kind} are not supported")
        return floats.tobytes()
