"""Launch a made-up GEMM twice on a driver that records, by native code: `python -m tests.launch_natively ARCHIVE`.

Writes ARCHIVE, and prints the file of the native code and how many launches it made. Needs neither torch nor pytest.
"""

from __future__ import annotations

import sys
from pathlib import Path

from runtime import Library, native
from runtime.container.archive import Archive

from .native_stand_in import exchange_capsule
from .recording_driver import (
    FakeTensor,
    FakeTorch,
    RecordingDriver,
    cubin,
    entry,
    gemm_record,
    signature,
    write_archive,
)


def main(path: Path) -> None:
    """Write the archive, call its GEMM twice, and say what launched."""
    sys.modules["torch"] = FakeTorch()
    setattr(FakeTensor, "__dlpack_c_exchange_api__", exchange_capsule(lambda device: 0))  # noqa: B010
    write_archive(path, [gemm_record("small")], [entry(signature(64, 64), [(None, "small")])])
    driver = RecordingDriver(kernels={cubin("small"): {"kernel_small": (128, 8, 24)}})
    library = Library(Archive.open(path), driver)
    for _ in range(2):
        library.gemm(FakeTensor((4, 64)), FakeTensor((64, 64)), out=FakeTensor((4, 64)))
    assert driver._shapes  # which only launches of native code are kept in
    print(native._native.__file__, len(driver.launches))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
