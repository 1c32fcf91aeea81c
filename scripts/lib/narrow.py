"""torchvision's models with fewer channels than its constructors allow."""

from torch import nn
from torchvision.models.efficientnet import EfficientNet, MBConvConfig
from torchvision.models.mobilenetv2 import MobileNetV2
from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3
from torchvision.models.resnet import ResNet
from torchvision.ops import Conv2dNormActivation


class NarrowResNet(ResNet):
    """The torchvision model, with `width` channels instead of 64."""

    def __init__(self, block, layers, width, classes):
        self.width = width
        super().__init__(block, layers)
        self.fc = nn.Linear(8 * width * block.expansion, classes)

    def _make_layer(self, block, planes, blocks, stride=1, dilate=False):
        if planes == 64:
            self.inplanes = self.width
            self.conv1 = nn.Conv2d(3, self.width, 7, stride=2, padding=3, bias=False)
            self.bn1 = nn.BatchNorm2d(self.width)
        return super()._make_layer(block, planes * self.width // 64, blocks, stride, dilate)


def narrow_mobilenet(last_channel, num_classes, **options):
    """The torchvision model, with `last_channel` channels instead of at least 1280."""
    model = MobileNetV2(num_classes=num_classes, **options)
    channels = model.features[-1][0].in_channels
    model.features[-1] = Conv2dNormActivation(channels, last_channel, kernel_size=1, activation_layer=nn.ReLU6)
    model.classifier[1] = nn.Linear(last_channel, num_classes)
    return model


# Input channels, kernel, expanded channels, output channels, squeeze-and-excitation, activation, stride of
# each block.
MOBILENET_V3_ROWS = [
    [8, 3, 8, 8, True, "RE", 2],
    [8, 3, 20, 12, False, "RE", 2],
    [12, 5, 24, 12, True, "HS", 1],
    [12, 5, 28, 16, True, "HS", 2],
]
# Expansion, kernel, stride, input channels, output channels, layers of each stage.
EFFICIENTNET_ROWS = [[1, 3, 1, 32, 8, 1], [3, 3, 2, 8, 12, 2], [2, 5, 2, 12, 16, 1]]


def narrow_mobilenet_v3(rows=MOBILENET_V3_ROWS, last_channel=20, num_classes=5):
    """The torchvision model, from rows with the sizes of its blocks."""
    settings = [InvertedResidualConfig(*row, dilation=1, width_mult=1.0) for row in rows]
    return MobileNetV3(settings, last_channel, num_classes=num_classes)


def narrow_efficientnet(rows=EFFICIENTNET_ROWS, last_channel=20, num_classes=5):
    """The torchvision model, from rows with the sizes of its stages."""
    settings = [MBConvConfig(*row, width_mult=1.0, depth_mult=1.0) for row in rows]
    for setting, row in zip(settings, rows):
        # The constructor rounds to multiples of 8.
        setting.input_channels, setting.out_channels = row[3], row[4]
    return EfficientNet(settings, 0.0, last_channel=last_channel, num_classes=num_classes)
