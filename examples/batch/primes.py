"""Count the primes of one slice of the numbers: independent tasks for the `general` class.

Each task takes its slice from BERTH_ARRAY_INDEX (or the first argument), needs nothing from the others and about a
second of one core. The counts of tasks 0 to k-1 add up to the number of primes below k times 20 million (1270607 for
one, 2433654 for two).

    python examples/batch/primes.py 3
"""

import math
import os
import sys
import time

SLICE = 20_000_000
CHECKED_BY_TRIAL = 20_000


def primes_below(limit: int) -> bytearray:
    """One byte per number below `limit`: 1 for primes (sieve of Eratosthenes)."""
    sieve = bytearray([1]) * limit
    sieve[:2] = bytes(min(2, limit))
    for number in range(2, math.isqrt(max(limit - 1, 0)) + 1):
        if sieve[number]:
            sieve[number * number :: number] = bytes(len(range(number * number, limit, number)))
    return sieve


def count_primes(begin: int, end: int) -> int:
    """How many primes are in [begin, end); memory follows the length of the slice, not its position."""
    small = primes_below(math.isqrt(max(end - 1, 0)) + 1)
    sieve = bytearray([1]) * (end - begin)
    for number in range(max(begin, 0), min(2, end)):
        sieve[number - begin] = 0
    for prime in range(2, len(small)):
        if small[prime]:
            first = max(prime * prime, (begin + prime - 1) // prime * prime)
            if first < end:
                sieve[first - begin :: prime] = bytes(len(range(first, end, prime)))
    return sieve.count(1)


def sample_is_right(begin: int, end: int) -> bool:
    """Check the end of the slice by trial division: a task that counts wrong should fail, not report."""
    sieve_count = count_primes(end - CHECKED_BY_TRIAL, end)
    slow_count = sum(
        all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
        for number in range(max(end - CHECKED_BY_TRIAL, begin, 2), end)
    )
    return sieve_count == slow_count


def main(arguments: list[str]) -> int:
    index = int(arguments[0] if arguments else os.environ.get("BERTH_ARRAY_INDEX", os.environ.get("BERTH_WORKER", "0")))
    began = time.monotonic()
    begin, end = index * SLICE, (index + 1) * SLICE
    print(f"task {index}: primes in [{begin}, {end})", flush=True)
    count = count_primes(begin, end)
    if not sample_is_right(begin, end):
        print(f"task {index}: the sieve disagrees with trial division", flush=True)
        return 1
    print(f"task {index}: {count} primes, {time.monotonic() - began:.2f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
