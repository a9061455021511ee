# What CUDA adds to the grammar of C++, in words of device.h.
s/extern __shared__ (\w+) (\w+)\[\];/\1* const \2 = \&emulation::shared<\1>(0);/
s/__shared__ (\w+) (\w+)(\[[^;]*\])?;/auto\& \2 = emulation::shared<\1\3>(__LINE__);/
