"""Environment variables of the GPU libraries, which all programs of a run must agree on.

A trainer and an engine that share an NCCL communicator hang if their NCCL_* variables differ.
"""

# Prefixes of variables that decide how a program computes and communicates on GPUs
DEVICE_PREFIXES = (
    "CUDA_",
    "FLASHINFER_",
    "FLASH_ATTN_",
    "HIP_",
    "NCCL_",
    "NVIDIA_",
    "ROCR_",
    "TORCH_NCCL_",
    "TRITON_",
    "VLLM_",
)
COMPILERS = ("CC", "CXX")  # compilers with which Triton and Inductor build their launchers
# Prefixes of variables that are also passed to programs on other nodes
CLUSTER_PREFIXES = ("FLASHINFER_", "FLASH_ATTN_", "NCCL_", "TORCH_NCCL_", "TRITON_", "VLLM_")
# Suffixes of variables that name an interface, an address, an adapter or a path of one node
NODE_ENDS = (
    "_CACHE",
    "_DIR",
    "_FILE",
    "_HCA",
    "_HOME",
    "_HOSTID",
    "_IFNAME",
    "_IP",
    "_PATH",
    "_PLUGIN",
    "_PORT",
    "_ROOT",
    "_SO",
)
# Words in the names of variables that contain a secret
SECRET_WORDS = frozenset("KEY KEYS TOKEN SECRET PASSWORD PASSWD CREDENTIAL CREDENTIALS".split())


def is_device_variable(name: str) -> bool:
    """Return whether all programs of a run on this machine need this variable. Keys and tokens are never passed on.

    >>> [name for name in ("NCCL_ALGO", "VLLM_API_KEY", "CC", "MY_NCCL") if is_device_variable(name)]
    ['NCCL_ALGO', 'CC']
    """
    return (name in COMPILERS or name.startswith(DEVICE_PREFIXES)) and not _is_secret(name)


def is_cluster_variable(name: str) -> bool:
    """Return whether programs on other nodes need this variable. Variables that describe one node are not passed on.

    >>> names = ("NCCL_ALGO", "NCCL_SOCKET_IFNAME", "VLLM_ATTENTION_BACKEND", "VLLM_HOST_IP", "CUDA_VISIBLE_DEVICES")
    >>> [name for name in names if is_cluster_variable(name)]
    ['NCCL_ALGO', 'VLLM_ATTENTION_BACKEND']
    """
    return name.startswith(CLUSTER_PREFIXES) and not name.endswith(NODE_ENDS) and not _is_secret(name)


def _is_secret(name: str) -> bool:
    return not SECRET_WORDS.isdisjoint(name.split("_"))
