"""The sampling noise as an integer hash, bit for bit the same in Python, C++ and torch.

Noise is keyed by (request seed, position of the token drawn, token id) and by nothing else: not by
step, row, rank or batch. Hence one request draws the same text wherever and whenever it runs.

The whole specification (all arithmetic modulo 2**64 in `mix64`, modulo 2**32 in `mix32`):

    mix64(z)  = z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB;
                z ^= z >> 31                                  (SplitMix64's finalizer, Stafford 13)
    mix32(x)  = x ^= x >> 16; x *= 0x21F0AAAD; x ^= x >> 15; x *= 0x735A2D97; x ^= x >> 15
                                                              (Wellons' hash prospector, low bias)
    key       = mix64(mix64(seed) + 0x9E3779B97F4A7C15 * (position + 1))        once a drawn token
    bits      = mix32(mix32(token * 0x9E3779B9 + low32(key)) + high32(key))     once a vocabulary id
    uniform   = (bits + 0.5) / 2**32                          in (0, 1), exact in float64
    gumbel    = -log(-log(uniform))                           argmax(logit / temperature + gumbel)

A 64-bit integer tensor holds every intermediate of `bits`: a product of two 32-bit numbers wraps,
but its low 32 bits (`& 0xFFFFFFFF`) are right.
"""

U32 = 0xFFFF_FFFF
U64 = 0xFFFF_FFFF_FFFF_FFFF
GOLDEN64 = 0x9E37_79B9_7F4A_7C15
GOLDEN32 = 0x9E37_79B9


def mix64(z: int) -> int:
    """SplitMix64's finalizer: a bijection of 64-bit integers."""
    z &= U64
    z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & U64
    z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & U64
    return z ^ (z >> 31)


def mix32(x: int) -> int:
    """A low-bias bijection of 32-bit integers."""
    x &= U32
    x = ((x ^ (x >> 16)) * 0x21F0_AAAD) & U32
    x = ((x ^ (x >> 15)) * 0x735A_2D97) & U32
    return x ^ (x >> 15)


def seed_of_choice(seed: int, choice: int) -> int:
    """The seed of choice `choice` of a request (u64); choice 0 keeps the request's own seed."""
    assert choice >= 0, choice
    return seed & U64 if choice == 0 else mix64(seed + GOLDEN64 * choice)


def draw_key(seed: int, position: int) -> int:
    """The key (u64) of the draw of the token that will stand at `position` of its sequence."""
    assert position >= 0, position
    return mix64(mix64(seed) + GOLDEN64 * (position + 1))


def token_bits(key: int, token: int) -> int:
    """The noise (u32) of one vocabulary id under a draw key."""
    return mix32(mix32(token * GOLDEN32 + (key & U32)) + (key >> 32))


def uniform(bits: int) -> float:
    """A number in (0, 1), exact in float64."""
    return (bits + 0.5) * 2.0**-32
