"""What XLA's GPU clients, their allocators, CUDA's and ROCm's libraries print when memory runs out: a table of wordings."""

from __future__ import annotations

from jaxmem_callbacks.recovery.texts.rule import Rule, rule

# bfc_allocator.cc of xla/tsl/framework: words of a failed try after which the caller goes on with less.
_GOES_ON = r".{0,200}?[Cc]aller indicates that this is not a failure"
# Kernels are tried out, and one that finds no room is left out: gpu_conv_algorithm_picker.cc, autotuner.cc.
_UNTUNED = (
    r".{0,200}?(?:[Cc]onvolution performance may be suboptimal|[Cc]ontinuing with (?:the )?(?:next|other|remaining) "
    r"|[Ss]kipping (?:this |the )?(?:config|candidate|algorithm)\b)"
)

# What CUDA's driver and runtime and ROCm's call it.
_REFUSED = (
    r"(?:CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory|hipErrorMemoryAllocation"
    r"|HIP_ERROR_OutOfMemory|out of memory)"
)

STATUSES: tuple[Rule, ...] = (
    # tf_allocator_adapter.cc, MemoryAllocationError: bytes until 2025-12, human sizes since, the allocator since 2026-07.
    rule(
        "client allocation",
        r"(?:O|\A)ut of memory while trying to allocate <requested>"  # a log may be cut at its beginning
        r"(?:\.? with allocator (?P<allocator>[\w./-]{1,80}?)(?: on device \d{1,5})?(?=[.,;:]?(?:\s|$)))?",
        phase="run",
        platform="gpu",
        unless=_UNTUNED,
    ),
    # CuPy's memory.pyx: its own pool beside JAX's, with a limit where one was set, else refused by the driver.
    rule(
        "CuPy",
        r"Out of memory allocating <requested> \(allocated so far: <used>, limit set to: <limit>\)",
        phase="run",
        platform="gpu",
    ),
    rule(
        "CuPy",
        r"Out of memory allocating <requested> \(allocated so far: <used>",
        phase="run",
        platform="gpu",
        driver=True,
    ),
    rule(
        "CuPy",
        r"\bcupy\.[\w.]{1,60}OutOfMemoryError: [Oo]ut of memory (?:to allocate|allocating) <requested>",
        phase="run",
        platform="gpu",
        driver=True,
    ),
    # The driver's calls as Python names them: Numba, PyCUDA, RMM.
    rule(
        "driver call",
        rf"(?:\b[Cc]all to (?:cu|hip)[A-Z]\w{{1,40}} results in {_REFUSED}|\bcu(?:Mem|Array)\w{{1,40}} failed: out of memory"
        rf"|\bout_of_memory: CUDA error at:?.{{0,300}}?{_REFUSED})",
        platform="gpu",
        driver=True,
    ),
    # The same with is_host_mem: pinned memory beside the GPU.
    rule("host allocation", r"Out of host memory while trying to allocate <requested>", phase="run", platform="host"),
    # stream_executor_memory_allocator / device_address_allocator: the platform allocator.
    rule(
        "platform allocator",
        r"[Ff]ailed to allocate request for <requested>(?: \(<requested_exact>\))?(?: on device ordinal \d{1,5})?",
        phase="run",
        platform="gpu",
        unless=_UNTUNED,
    ),
    # device_address_vmm_allocator.cc: physical memory counted against a budget; two wordings of the same refusal.
    rule(
        "vmm allocator",
        r"Not enough PA budget(?: for allocation)?: pa_allocated=<used>, (?:rounded_size|allocation_size)=<requested>,"
        r" pa_budget=<limit>",
        phase="run",
        platform="gpu",
    ),
    # TensorFlow's kernels, which share the allocators.
    rule(
        "tensor",
        r"OOM when allocating tensor with shape.{0,400}?device:GPU.{0,60}?by allocator (?P<allocator>[\w.-]{1,80})",
        phase="run",
        platform="gpu",
    ),
    # redzone_allocator.cc and the scratch allocators of convolutions and Fourier transforms: a limit on one buffer.
    rule(
        "scratch limit",
        r"Allocating <requested> exceeds the memory limit of <limit>",
        platform="gpu",
        unless=_UNTUNED,
    ),
    # gpu_executor: constants of a program, and scratch and work areas of libraries.
    rule("constant", r"[Ff]ailed to allocate <requested> for (?:a )?new constant", platform="gpu"),
    rule(
        "work area",
        r"[Ff]ailed to allocate (?:work area|scratch (?:memory|space)|(?:<requested> )?for all-reduce"
        r"|RaggedAllToAll barrier buffers|output offsets buffer)",
        platform="gpu",
    ),
    # cuda_command_buffer.cc: graphs need driver memory beside the pool.
    rule(
        "command buffer",
        r"(?:ran out of memory trying to instantiate command buffer"
        rf"|[Ff]ailed to (?:instantiate|create|launch|update|add)[^.;]{{0,60}}? graph[^.;]{{0,80}}?{_REFUSED})",
        phase="run",
        platform="gpu",
        driver=True,
    ),
    # cuda_kernel.cc, cuda_stream.cc and their like of ROCm: a launch takes local memory, and loads a kernel at its first one.
    rule(
        "kernel launch",
        r"(?:[Ff]ailed to launch (?:a )?(?:cooperative )?(?:CUDA|ROCm|ROCM|HIP|GPU) (?:cooperative )?kernel"
        rf"|\b(?:cu|cuda|hip)(?:Module)?LaunchKernel(?:ExC)? failed).{{0,400}}?{_REFUSED}",
        phase="run",
        platform="gpu",
        driver=True,
    ),
    # The stream's other calls, which report what went wrong before them.
    rule(
        "stream",
        r"(?:[Cc]ould not synchronize on (?:CUDA|ROCm|ROCM|HIP|GPU) (?:context|stream)"
        r"|[Ff]ailed to (?:synchronize|enqueue (?:async )?(?:memcpy|memset)|(?:async )?mem(?:cpy|set))"
        rf"|\b(?:cu|cuda|hip)(?:Stream|Ctx|Device)Synchronize failed).{{0,200}}?{_REFUSED}",
        phase="run",
        platform="gpu",
        driver=True,
    ),
    # cuda_executor.cc LoadCubin / rocm LoadHsaco: where a program is named it is being loaded, so run; else unknown.
    rule(
        "kernel image",
        rf"[Ff]ailed to load (?:in-memory )?(?:CUBIN|PTX|HSACO|module).{{0,200}}?{_REFUSED}",
        platform="gpu",
        driver=True,
    ),
    # NCCL's debug.h and RCCL's: buffers of collectives, which are outside the pool.
    rule(
        "collective",
        r"(?:Cuda|HIP|CUDA) failure (?:\d{1,4} )?'out of memory'",
        phase="run",
        platform="gpu",
        driver=True,
    ),
    rule(
        "collective",
        r"Failed to CUDA (?:malloc|calloc)(?: async)? <requested>",
        phase="run",
        platform="gpu",
        driver=True,
    ),
    # nvshmem_collectives.cc: a symmetric heap of its own.
    rule(
        "collective",
        r"[Ff]ailed to allocate <requested> \(<requested_exact>\) from NVSHMEM memory",
        phase="run",
        platform="gpu",
    ),
    rule(
        "collective", r"[Ff]ailed to allocate (?:nvshmem|NVSHMEM|NCCL) collective memory", phase="run", platform="gpu"
    ),
    # RAFT's resources in XLA's selection of the largest: RMM's words.
    rule(
        "RMM",
        r"(?:Exceeded memory limit|Maximum pool size exceeded|CUDA error) \(failed to allocate <requested>\)",
        phase="run",
        platform="gpu",
    ),
    # stream_executor.h: a bound that was set for the device.
    rule(
        "device limit",
        r"Not enough memory to allocate <requested> on device \d{1,5} within provided limit\."
        r"(?:\s+\[?(?:used=<used>, )?limit=<limit>\]?)?",
        platform="gpu",
        strength="log",
    ),
    # PyTorch's allocator, where its programs and JAX's share a log: three wordings of what was free. 2.0 and 2.1 misspell one.
    rule(
        "PyTorch",
        r"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate <requested> \(GPU \d{1,4}; <limit> total capacity;"
        r"(?:.{0,80}?; <free> free)?",
        phase="run",
        platform="gpu",
        driver=True,
    ),
    rule(
        "PyTorch",
        r"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate <requested>\.?"
        r"(?:.{0,40}?total capaci?ty of <limit> of which <free> is free)?",
        phase="run",
        platform="gpu",
        driver=True,
    ),
    # Apple's GPUs, whose memory is the host's with a limit of its own.
    rule(
        "PyTorch",
        r"MPS backend out of memory(?: \(MPS allocated: <used>, other allocations: [^,()]{1,30}, max allowed: <limit>\)\."
        r" Tried to allocate <requested>)?",
        phase="run",
        platform="gpu",
    ),
    # The same with the driver's pool (backend:cudaMallocAsync), a figure a line.
    rule(
        "PyTorch",
        r"Allocation on device \d{1,4} would exceed allowed memory\.(?: \(out of memory\))?"
        r"(?: Currently allocated : <used> Requested : <requested> Device limit : <limit>"
        r"(?: Free \(according to CUDA\): <free>)?)?",
        phase="run",
        platform="gpu",
        driver=True,
    ),
    # iree and ROCm's HIP layer.
    rule(
        "HIP",
        r"(?:failed to allocate buffer of length <requested>|\bhip\w{0,40}\b.{0,80}?failed.{0,40}?out of memory)",
        platform="gpu",
        driver=True,
    ),
)

LINES: tuple[Rule, ...] = (
    # The pool of pinned memory has the same allocator, which its name shows.
    rule(
        "host pool",
        r"Allocator \((?P<allocator>[\w.-]{0,40}host[\w.-]{0,40})\) ran out of memory trying to allocate <requested>"
        r"(?!\.?\s+with freed_by)",
        platform="host",
        strength="log",
        unless=_GOES_ON,
    ),
    # bfc_allocator.cc, AllocateRaw: three wordings over the years; "(rounded to N)" is the bin's size, not the request.
    rule(
        "pool",
        r"Allocator \((?P<allocator>[^)\s]{1,80})\) ran out of memory trying to allocate <requested>(?!\.?\s+with freed_by)",
        platform="gpu",
        strength="log",
        unless=_GOES_ON,
    ),
    rule(
        "pool", r"\bRan out of memory trying to allocate <requested>", platform="gpu", strength="log", unless=_GOES_ON
    ),
    # gpu_cudamallocasync_allocator.cc: the driver's own pool; the name stands before the function.
    rule(
        "driver's pool",
        r"(?:\b(?P<allocator>gpu_async_\d{1,4}|[\w.-]{1,60}async[\w.-]{0,20}) )?cuMemAllocAsync failed to allocate <requested>"
        r"(?:: [^\n]{0,200})?(?:\s+(?:Reported by CUDA: )?Free memory/Total memory: <free>/<limit>)?",
        platform="gpu",
        strength="log",
        driver=True,
    ),
    # cuda_executor.cc and rocm_driver.cc, DeviceAllocate: the pool asks again for less after one of these.
    rule(
        "driver",
        r"failed to allocate <requested> \(<requested_exact>\) from device:"
        rf" (?:\w{{1,30}}(?: \d{{1,5}})?: )?(?::\s*)?(?:\w{{0,40}})?{_REFUSED}",
        platform="gpu",
        strength="hint",
        driver=True,
    ),
    # stream_executor_allocator.cc, which the pool asks; of pinned memory see host.py.
    rule(
        "driver",
        r"[Cc]ould not allocate (?:device|unified|collective|unknown)(?: memory)? of size: <requested>",
        platform="gpu",
        strength="hint",
        driver=True,
    ),
    # cuda_collectives.cc: memory that NCCL allocates.
    rule(
        "collective",
        r"failed to allocate <requested> \(<requested_exact>\) from device collective memory",
        phase="run",
        platform="gpu",
        strength="log",
    ),
    # cuda_context.cc: the context itself does not fit; the figure is the device's size.
    rule(
        "context",
        r"cuDevicePrimaryCtxRetain: (?:CUDA_ERROR_OUT_OF_MEMORY|[^;]{0,60}out of memory)[^;]{0,60};"
        r" total memory reported: <limit>",
        platform="gpu",
        strength="hint",
        driver=True,
    ),
    # Handles of cuBLAS, cuSOLVER, cuDNN, cuFFT: their own memory is outside the pool.
    rule(
        "library handle",
        r"(?:(?:CU|HIP|ROC)?(?:BLAS|SOLVER|DNN|FFT|SPARSE|RAND)\w{0,20}_ALLOC_FAILED"
        r"|CUSPARSE_STATUS_INSUFFICIENT_RESOURCES|CUDNN_STATUS_\w{1,20}_DEVICE_ALLOCATION_FAILED|\bmiopenStatusAllocFailed\b|\brocblas_status_memory_error\b"
        r"|\b(?:cu|hip|roc)(?:Blas|BLAS|Solver|SOLVER|Sparse|SPARSE|Dnn|DNN|Fft|FFT|Rand|RAND) allocation failed"
        r"|(?:cublas|cusolver|cudnn|cufft|cusparse|rocblas|hipblas|handle).{0,160}?the resource allocation failed)",
        platform="gpu",
        strength="log",
    ),
)

FALLBACKS: tuple[Rule, ...] = (
    # The driver's error by name, whatever asked for memory.
    rule(
        "CUDA error",
        r"(?:CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
        r"|\bC(?:UDA|uda) (?:[Dd]river |[Rr]untime )?(?:(?:error|failure)(?: \d{1,4})?: out of memory|\(out of memory\)))",
        platform="gpu",
        strength="log",
        vague=True,
        driver=True,
    ),
    rule(
        "HIP error",
        r"(?:hipErrorOutOfMemory|hipErrorMemoryAllocation|HIP_ERROR_OutOfMemory|HIP error: out of memory"
        r"|HSA_STATUS_ERROR_OUT_OF_RESOURCES)",
        platform="gpu",
        strength="log",
        vague=True,
        driver=True,
    ),
    # Intel's: the layers of oneAPI.
    rule(
        "oneAPI error",
        r"\b(?:UR_RESULT|ZE_RESULT|PI)_ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)\b",
        platform="gpu",
        strength="log",
        vague=True,
        driver=True,
    ),
    # jaxlib's kernels: "operation cudaMalloc(...) failed: out of memory".
    rule(
        "GPU library",
        r"\b(?:cuda|gpu|cu)[A-Z]\w{0,60}.{0,120}?failed.{0,40}?\bout of memory",
        platform="gpu",
        vague=True,
        driver=True,
    ),
)
