"""The limits and defaults that both sides or several files of the engine share, in one table.

Sizes are bytes, times are seconds. Sizes that arrive from the network are checked against these before any allocation.
"""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30

# Protocol
PROTOCOL_VERSION = 1
DEFAULT_PORT = 7690

# One message
MAX_HEADER_BYTES = 8 * MIB
# What a byte of a header's JSON takes once it is parsed, at worst.
PARSED_PER_HEADER_BYTE = 32
# The header of a HELLO; nobody has said yet who sends it.
MAX_HELLO_BYTES = 64 * 1024
# Headers up to this size are remembered once they are understood: steps of a run hardly differ in them.
REPEATED_HEADER_BYTES = 16 * 1024
MAX_TENSORS = 65_536
MAX_TENSOR_DIMS = 16
MAX_MESSAGE_BYTES = 4 * GIB
MAX_TREE_DEPTH = 32
# A LoRA can be larger than one message; its tensors go in batches of this size.
TENSOR_BATCH_BYTES = 256 * MIB

# Channel
DATA_LANES = 2
MAX_LANES = 16
# Each frame has to arrive within HEARTBEAT_TIMEOUT, or a slow link is taken for a dead one: so 2 MB/s is enough for two
# data lanes, what the system keeps in its buffers included.
CHUNK_BYTES = MIB // 2
# Tensors up to this size travel inside their message: gathering chunks from the lanes would cost more than it saves.
INLINE_BYTES = MIB // 2
SOCKET_BUFFER_BYTES = 4 * MIB
# Memory that a channel keeps to receive large tensors in.
RECEIVE_BUFFER_BYTES = 256 * MIB
# Chunks of messages whose header has not arrived yet (lanes are separate connections, so they can overtake it).
MAX_EARLY_CHUNK_BYTES = 1 * GIB
# Messages that are not complete yet, all of them together.
MAX_PENDING_BYTES = 2 * MAX_MESSAGE_BYTES
# What keeping a chunk or a message costs besides its bytes; libzmq shares one buffer of this size among small frames.
KEEPING_BYTES = 8 * 1024
LANE_QUEUE_MESSAGES = 512
POLL_SECONDS = 0.05
# The same where the next share or its result is due: caches that have not gone cold save a tenth of a millisecond or
# two, and waking so often takes a few per cent of a core.
ALERT_POLL_SECONDS = 0.002
CLOSE_LINGER_SECONDS = 0.25

# Exchange of tokens (token split): its own lanes, behind the port after the worker's own.
EXCHANGE_LANES = 4
EXCHANGE_MIN_CHUNK_BYTES = 1 * MIB
EXCHANGE_CHUNK_BYTES = 4 * MIB
EXCHANGE_JOIN_TIMEOUT = 10.0
# A new exchange is tried with the first of these, and if that took no longer than so many seconds, with the second.
EXCHANGE_FIRST_PROBE_BYTES = 1 * MIB
EXCHANGE_PROBE_SECONDS = 0.25
EXCHANGE_PROBE_BYTES = 16 * MIB
# Process groups of torch.distributed: making an NCCL communicator takes seconds.
GROUP_JOIN_TIMEOUT = 30.0
GROUP_CLOSE_TIMEOUT = 2.0

# Liveness: a peer is lost after HEARTBEAT_INTERVAL + HEARTBEAT_TIMEOUT of silence at the latest, never for being slow.
HEARTBEAT_INTERVAL = 0.5
HEARTBEAT_TIMEOUT = 1.25
CONNECT_TIMEOUT = 2.0
# How long a worker's other addresses are waited for once one has answered.
OTHER_ADDRESSES_SECONDS = 0.25
# A handshake with keys takes this many round trips at most, which a driver waits for beyond CONNECT_TIMEOUT; a worker,
# which cannot know how far a driver is, waits this long.
HANDSHAKE_TRIPS = 4
HANDSHAKE_TIMEOUT = 8.0
HELLO_TIMEOUT = 5.0
# A worker that is alive and takes no more data for this long is stuck.
STALL_TIMEOUT = 600.0
# Connections that have not said HELLO yet; the oldest are forgotten first.
MAX_STRANGERS = 64
# A run looks for a worker that it lost, or that is not there, after this long, and then after twice as long each time.
REJOIN_FIRST_SECONDS = 0.25
REJOIN_MAX_SECONDS = 10.0
# A worker that failed in a forward gets one more chance in a run, after this long.
REJOIN_FAILED_SECONDS = 1.0
# An attempt to connect that fails after this long met silence. Later runs wait for that address this little when they
# begin, or not at all: it is looked for in the background.
SILENT_SECONDS = 0.5
ABSENT_GRACE_SECONDS = 0.5
ABSENT_MAX_SECONDS = 60.0
# What a driver has let go of within this time is told to a worker together.
FREE_GATHER_SECONDS = 0.25
# How often a worker makes sure that the driver it serves is still connected.
DRIVER_PROBE_INTERVAL = 0.5
# After so long without its own code on disk an idle worker ends: the pack was uninstalled. An update is over sooner.
UNINSTALLED_SECONDS = 20.0

# What a driver has asked for and a worker has not begun with (forwards, joins, models), and answers that nobody reads.
MAX_WAITING_JOBS = 64
MAX_WAITING_BYTES = 2 * MAX_MESSAGE_BYTES

# Machines of one token split.
MAX_RANKS = 64

# Pairing: how long a code is good, and how many unknown keys one address may show within how long.
PAIRING_CODE_SECONDS = 600
PAIRING_ATTEMPTS = 10
PAIRING_ATTEMPTS_SECONDS = 60.0
MAX_NAME = 64

# Tensors a run keeps on the worker so that they are not sent again (prompt embeddings, masks).
RUN_TENSOR_CACHE_BYTES = 512 * MIB
# Smaller ones are cheaper to send than to look up.
RUN_TENSOR_MIN_BYTES = 32 * 1024
RUN_TENSOR_VERSIONS = 8
# Weight-patch tensors (LoRA) a worker keeps between runs.
PATCH_TENSOR_CACHE_BYTES = 4 * GIB
# Those of one recipe, which stay as long as it is being completed.
RECIPE_TENSOR_BYTES = 16 * GIB

# File streaming
FILE_CHUNK_BYTES = 4 * MIB
FILE_WINDOW_CHUNKS = 8
FILE_CACHE_BYTES = 200 * GIB
# A file that arrived in part is recorded this often, and waits this long to be sent to its end.
FILE_RECORD_BYTES = 32 * MIB
FILE_PART_SECONDS = 7 * 86_400.0
# Left free on the disk that holds the cache.
FILE_CACHE_RESERVE_BYTES = 2 * GIB
DIGEST_BLOCK_BYTES = 1 * MIB
DIGEST_BLOCKS = 16
DIGEST_SAMPLE_BYTES = 1024

# How long `auto` waits for a worker that only has to say that it holds the model already.
WARM_WORKER_SECONDS = 0.5

# Measuring a link: what one message carries, how long each direction is measured, plain TCP connections to a worker
# (behind the port after that of exchanges) and how long it takes them.
ECHO_BYTES = 32 * MIB
LINK_TEST_SECONDS = 0.5
SINK_STREAMS = 4
SINK_SECONDS = 5.0

# Split or not (see plan)
TRIAL_FORWARDS = 2
# A split has to beat one machine by this much to be kept.
WORTHWHILE_RATIO = 0.97
# A split by tokens has to be predicted to beat one by rows by this much to be tried in its place.
TOKENS_OVER_ROWS_RATIO = 0.9

# Largest relative difference (norm of the difference over norm) between driver and worker on the same rows.
CHECK_TOLERANCE_32BIT = 1e-3
CHECK_TOLERANCE_16BIT = 6e-2
# The same where tokens are exchanged in fewer bytes.
CHECK_TOLERANCE_COMPRESSED = 1e-1
