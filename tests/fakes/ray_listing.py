"""Answers as `penstock.fleet.discovery.ray_listing` does, without a cluster: `broken` is one that cannot be asked.

`odd` tells of something that is no URL besides.
"""

import json
import sys

if __name__ == "__main__":
    address, application = sys.argv[1:]
    for number, _ in enumerate(sys.stdin):
        if address == "broken":
            sys.exit("no cluster")
        odd = [None] if address == "odd" else []
        print(json.dumps(odd + [f"http://{application}-{index}:80" for index in range(number + 1)]), flush=True)
