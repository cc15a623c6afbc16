"""The six pixel operations: quality, speed, and overhead of the toolbox pool. See benchmarks/README.md."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.harness import Report, parse_args

PARTS = ("quality", "heldout", "tracking", "speed", "pool")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operations", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="quality, heldout, tracking, speed, pool; default all"
    )
    parser.add_argument(
        "--quick", action="store_true", help="measure a part of each set, about two minutes in all"
    )
    parser.add_argument(
        "--photos", type=Path, help="folder with the examples of Debian's opencv-doc: more real pictures"
    )
    parser.add_argument(
        "--sam", metavar="FOLDER", help="a SAM or SAM 2 checkpoint of transformers, measured beside mobilenet"
    )
    parser.add_argument(
        "--bsds", type=Path, help="BSDS500's data folder (images, groundTruth): held-out objects"
    )
    parser.add_argument(
        "--coco",
        type=Path,
        help="COCO128 with polygons (images/train2017, labels/train2017): held-out objects",
    )
    parser.add_argument(
        "--chart",
        type=Path,
        help="with --bsds or --coco: PNG to which quality draws scores and IoUs of masks",
    )
    args = parse_args(parser, quick=True)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    report = Report("Pixel operations")
    for part in args.parts or PARTS:
        if part == "quality":
            from benchmarks import operation_quality

            thin = 20 if args.smoke else 4 if args.quick else 1
            operation_quality.run(report, args, thin)
        elif part == "heldout":
            from benchmarks import operation_heldout

            operation_heldout.run(
                report, args.photos, args.bsds, 20 if args.smoke else 4 if args.quick else 1
            )
        elif part == "tracking":
            from benchmarks import operation_tracking

            operation_tracking.run(report, 20 if args.smoke else 4 if args.quick else 1)
        elif part == "speed":
            from benchmarks import operation_speed

            operation_speed.run(report, 2 if args.smoke else 5 if args.quick else 11)
        else:
            from benchmarks import operation_pool

            operation_pool.run(report, 20 if args.smoke else 200 if args.quick else 1000)
    report.close()


if __name__ == "__main__":
    main()
