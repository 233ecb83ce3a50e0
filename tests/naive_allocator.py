"""A second caching allocator, written to be read: plain lists, every search looks at every block.

It shares no code with the package. It records what it does in the layout of ``torch.cuda.memory._snapshot()``
(torch/csrc/cuda/Module.cpp: keys, words and order of ``allocator_settings``), so that recordings of any history,
with known truth, can be made without a GPU.
"""

import random

KIB, MIB = 2**10, 2**20
FREE, LIVE, PENDING, UNMAPPED = "inactive", "active_allocated", "active_pending_free", "unmapped"
RANGE = 300 * 20 * MIB


class OutOfMemory(Exception):
    pass


class Naive:
    def __init__(self, *, expandable=False, divisions=None, limit=None, seed=0, base=0x7F00_0000_0000):
        self.expandable, self.limit = expandable, limit
        self.divisions = divisions or [0] * 16
        self.random, self.base = random.Random(seed), base
        self.chains = []  # segments, or ranges: {"address", "size", "stream", "small", "blocks"}
        self.events = []
        self.clock = 0

    # -- sizes

    def rounded(self, size):
        if size < 512:
            return 512
        interval = 0
        while interval < 15 and size >= 2 ** (20 + interval + 1):
            interval += 1
        divisions = self.divisions[interval]
        if divisions > 1 and size > 512 * divisions:
            power = 1
            while power * 2 <= size:
                power *= 2
            target = power
            while target < size:
                target += power // divisions
            return target
        while size % 512:
            size += 1
        return size

    @staticmethod
    def segment_size(size):
        if size <= MIB:
            return 2 * MIB
        if size < 10 * MIB:
            return 20 * MIB
        while size % (2 * MIB):
            size += 512
        return size

    # -- what users call

    def malloc(self, requested, stream=0):
        size = self.rounded(requested)
        small = size <= MIB
        found = self.search(size, stream, small)
        if found is None:
            found = self.more(size, stream, small)
        if found is None:
            self.empty_cache()
            found = self.more(size, stream, small)
        if found is None:
            self.record("oom", 0, size, stream)
            raise OutOfMemory
        chain, block = found
        rest = block["size"] - size
        if ((small or self.expandable) and rest >= 512) or rest > MIB:
            position = chain["blocks"].index(block)
            upper = {"address": block["address"] + size, "size": rest, "requested": 0, "state": FREE}
            chain["blocks"].insert(position + 1, upper)
            block["size"] = size
        block["state"], block["requested"] = LIVE, requested
        self.record("alloc", block["address"], requested, stream)
        return block["address"]

    def free(self, address, *, wait=False):
        """With ``wait`` the block was used on another stream: it is free once ``complete`` is called."""
        chain, block = self.at(address)
        assert block["state"] == LIVE
        self.record("free_requested", address, block["requested"], chain["stream"])
        block["state"] = PENDING
        if not wait:
            self.complete(address)

    def complete(self, address):
        chain, block = self.at(address)
        assert block["state"] == PENDING
        self.record("free_completed", address, block["requested"], chain["stream"])
        block["state"] = FREE
        self.join(chain)

    def empty_cache(self):
        for chain in list(self.chains):
            if not self.expandable:
                if [b["state"] for b in chain["blocks"]] == [FREE]:
                    self.chains.remove(chain)
                    self.record("segment_free", chain["address"], chain["size"], chain["stream"])
                continue
            page, gave_back = 2 * MIB if chain["small"] else 20 * MIB, False
            for block in list(chain["blocks"]):
                if block["state"] != FREE:
                    continue
                inside = [
                    start
                    for start in range(chain["address"], chain["address"] + chain["size"], page)
                    if block["address"] <= start and start + page <= block["address"] + block["size"]
                ]
                if not inside:
                    continue
                position = chain["blocks"].index(block)
                cuts = [block["address"], inside[0], inside[-1] + page, block["address"] + block["size"]]
                parts = [
                    {"address": a, "size": b - a, "requested": 0, "state": state}
                    for a, b, state in zip(cuts, cuts[1:], (FREE, UNMAPPED, FREE), strict=False)
                    if b > a
                ]
                chain["blocks"][position : position + 1] = parts
                self.record("segment_unmap", inside[0], len(inside) * page, chain["stream"])
                gave_back = True
            self.join(chain)
            if gave_back and [b["state"] for b in chain["blocks"]] == [UNMAPPED]:
                self.chains.remove(chain)

    # -- inside

    def search(self, size, stream, small):
        candidates = []
        for chain in self.chains:
            if chain["stream"] == stream and chain["small"] == small:
                for block, following in zip(chain["blocks"], [*chain["blocks"][1:], None], strict=True):
                    if block["state"] == FREE and block["size"] >= size:
                        grows = following is not None and following["state"] == UNMAPPED
                        reach = block["size"] + (following["size"] if grows else 0)
                        candidates.append((block["size"], block["address"], reach, chain, block))
        candidates.sort(key=lambda c: c[:2])
        if not candidates:
            return None
        chosen = 0
        while self.expandable and chosen + 1 < len(candidates) and candidates[chosen + 1][2] < candidates[chosen][2]:
            chosen += 1
        return candidates[chosen][3:]

    def more(self, size, stream, small):
        if self.expandable:
            return self.grow(size, stream, small)
        segment = self.segment_size(size)
        if self.limit is not None and self.reserved + segment > self.limit:
            return None
        address = self.driver_address(segment)
        block = {"address": address, "size": segment, "requested": 0, "state": FREE}
        chain = {"address": address, "size": segment, "stream": stream, "small": small, "blocks": [block]}
        self.chains.append(chain)
        self.record("segment_alloc", address, segment, stream)
        return chain, block

    def grow(self, size, stream, small):
        page = 2 * MIB if small else 20 * MIB
        place = None
        for chain in sorted(self.chains, key=lambda c: c["address"]):
            if chain["stream"] != stream or chain["small"] != small or place is not None:
                continue
            for position in range(len(chain["blocks"])):
                if place is not None:
                    break
                stretch = []
                for block in chain["blocks"][position:]:
                    if block["state"] in (LIVE, PENDING):
                        break
                    stretch.append(block)
                    if sum(b["size"] for b in stretch) >= size:
                        break
                enough = sum(b["size"] for b in stretch) >= size
                # A place is looked for at each unmapped block, beginning at a free block right before it.
                starts = [b["state"] for b in stretch[:2]]
                if enough and (starts[:1] == [UNMAPPED] or starts == [FREE, UNMAPPED]):
                    place = (chain, chain["blocks"][position]["address"])
        if place is None:
            address = self.driver_address(RANGE)
            block = {"address": address, "size": RANGE, "requested": 0, "state": UNMAPPED}
            chain = {"address": address, "size": RANGE, "stream": stream, "small": small, "blocks": [block]}
            self.chains.append(chain)
            place = (chain, address)
        chain, address = place
        while True:
            block = self.block(chain, address)
            if block["state"] == FREE and block["size"] >= size:
                return chain, block
            have = block["size"] if block["state"] == FREE else 0
            behind = self.block(chain, address + have)
            pages = 0
            while pages < min(size - have, behind["size"]):
                pages += page
            if self.limit is not None and self.reserved + pages > self.limit:
                return None
            position = chain["blocks"].index(behind)
            parts = [{"address": behind["address"], "size": pages, "requested": 0, "state": FREE}]
            if behind["size"] > pages:
                start, rest = behind["address"] + pages, behind["size"] - pages
                parts.append({"address": start, "size": rest, "requested": 0, "state": UNMAPPED})
            chain["blocks"][position : position + 1] = parts
            self.record("segment_map", behind["address"], pages, stream)
            self.join(chain)

    @staticmethod
    def join(chain):
        joined = []
        for block in chain["blocks"]:
            if joined and block["state"] in (FREE, UNMAPPED) and joined[-1]["state"] == block["state"]:
                joined[-1]["size"] += block["size"]
            else:
                joined.append(block)
        chain["blocks"] = joined

    def driver_address(self, size):
        """Any hole between segments, chosen at random: recordings show no order."""
        taken = sorted((c["address"], c["address"] + c["size"]) for c in self.chains)
        holes, end = [], self.base
        for start, stop in taken:
            if start - end >= size:
                holes.append(end)
            end = stop
        return self.random.choice([*holes, end + 2 * MIB * self.random.randrange(3)])

    def at(self, address):
        for chain in self.chains:
            for block in chain["blocks"]:
                if block["address"] == address and block["state"] in (LIVE, PENDING):
                    return chain, block
        raise KeyError(address)

    @staticmethod
    def block(chain, address):
        return next(b for b in chain["blocks"] if b["address"] == address)

    def record(self, action, address, size, stream):
        self.clock += 1
        entry = {"action": action, "device_free" if action == "oom" else "addr": address, "size": size}
        self.events.append({**entry, "stream": stream, "time_us": self.clock})

    # -- what users see

    @property
    def reserved(self):
        return sum(b["size"] for c in self.chains for b in c["blocks"] if b["state"] != UNMAPPED)

    @property
    def allocated(self):
        return sum(b["size"] for c in self.chains for b in c["blocks"] if b["state"] == LIVE)

    def segments(self):
        """What ``memory_snapshot`` lists: of a range each run of mapped blocks."""
        runs = []
        for chain in self.chains:
            run = None
            for block in chain["blocks"]:
                if block["state"] == UNMAPPED:
                    run = None
                elif run is None:
                    run = (chain, [block])
                    runs.append(run)
                else:
                    run[1].append(block)
        return sorted(runs, key=lambda run: run[1][0]["address"])

    def snapshot(self, *, device=0, devices=1, frames=False, pool_ids=True):
        stack = [{"name": "forward", "filename": "model.py", "line": 7}] if frames else []
        listed = []
        for chain, blocks in self.segments():
            inside = [
                {
                    "address": b["address"],
                    "size": b["size"],
                    "requested_size": b["requested"],
                    "state": b["state"],
                    "frames": stack,
                }
                for b in blocks
            ]
            listed.append(
                {
                    "device": device,
                    "address": blocks[0]["address"],
                    "total_size": sum(b["size"] for b in blocks),
                    "allocated_size": sum(b["size"] for b in blocks if b["state"] == LIVE),
                    "active_size": sum(b["size"] for b in blocks if b["state"] in (LIVE, PENDING)),
                    "requested_size": sum(b["requested"] for b in blocks if b["state"] in (LIVE, PENDING)),
                    "stream": chain["stream"],
                    "segment_type": "small" if chain["small"] else "large",
                    "segment_pool_id": (0, 0),
                    "is_expandable": self.expandable,
                    "frames": stack,
                    "blocks": inside,
                }
            )
        traces = [[] for _ in range(devices)]
        for event in self.events:
            entry = {"frames": stack, **event} if frames else dict(event)
            traces[device].append({**entry, "pool_id": (0, 0)} if pool_ids else entry)
        return {
            "segments": listed,
            "device_traces": traces,
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True" if self.expandable else "",
                "max_split_size": -1,
                "garbage_collection_threshold": 0.0,
                "expandable_segments": self.expandable,
                "pinned_num_register_threads": 1,
                "release_lock_on_cudamalloc": False,
                "pinned_use_cuda_host_register": False,
                "roundup_power2_divisions": {str(2**i): d for i, d in enumerate(self.divisions)},
            },
            "external_annotations": [],
        }
