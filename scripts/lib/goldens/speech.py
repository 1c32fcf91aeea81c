"""Write tests/golden/speech: recordings, and their spectrograms by WhisperFeatureExtractor of transformers.

    scripts/goldens speech

Each folder has preprocessor_config.json, speech.wav and features.safetensors with "input_features" [1, filters,
windows]. Recordings are a rising tone with an overtone, and noise, shorter than the model's window.
"""

import random
import math
import wave

import numpy
import transformers

from lib import GOLDEN
from lib.arrays import save_file

FOLDER = GOLDEN / "speech"
# The standard sizes except for the length; and windows that are not twice as long as a step, with an
# incomplete last window.
SIZES = {
    "usual": {"feature_size": 40, "chunk_length": 1},
    "other": {"feature_size": 12, "chunk_length": 1, "sampling_rate": 8000, "n_fft": 250, "hop_length": 96},
}


def recording(name, rate):
    rng = random.Random(name)
    samples = []
    for at in range(rate * 2 // 5):
        seconds = at / rate
        tone = math.sin(2 * math.pi * (200 + 900 * seconds) * seconds)
        samples.append(0.4 * tone + 0.1 * math.sin(3 * math.asin(tone)) + 0.02 * rng.gauss(0, 1))
    return numpy.clip(numpy.round(numpy.array(samples) * 32768), -32768, 32767).astype("<i2")


for name, sizes in SIZES.items():
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    extractor = transformers.WhisperFeatureExtractor(**sizes)
    extractor.save_pretrained(folder)
    samples = recording(name, extractor.sampling_rate)
    with wave.open(str(folder / "speech.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(extractor.sampling_rate)
        file.writeframes(samples.tobytes())
    floats = samples.astype(numpy.float32) / 32768
    features = extractor(floats, sampling_rate=extractor.sampling_rate, return_tensors="np").input_features
    save_file({"input_features": features.astype(numpy.float32)}, folder / "features.safetensors")
    print(name, features.shape, features.min(), features.max())
