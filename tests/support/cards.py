"""Made-up devices: GPUs as their drivers would report them."""

from flashladder.common.runtime.device import Device


def card(name, num_sms, memory_gib, arch="sm_90a", clock_mhz=1980):
    """A device with the limits of a Hopper SM, an L2 of 7 MiB and memory of 1,024 bits at 2 GHz."""
    return Device(
        name=name,
        arch=arch,
        memory_bytes=int(memory_gib * 2**30),
        num_sms=num_sms,
        shared_per_block=232448,
        shared_per_sm=233472,
        registers_per_sm=65536,
        max_threads_per_sm=2048,
        max_ctas_per_sm=32,
        l2_bytes=7 * 2**20,
        clock_khz=clock_mhz * 1000,
        memory_clock_khz=2_000_000,
        memory_bus_bits=1024,
    )


H100 = card("NVIDIA H100 80GB HBM3", 132, 79.1)
