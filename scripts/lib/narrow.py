"""torchvision's models with fewer channels than its constructors allow."""

from torch import nn
from torchvision.models.mobilenetv2 import MobileNetV2
from torchvision.models.resnet import ResNet
from torchvision.ops import Conv2dNormActivation


class NarrowResNet(ResNet):
    """torchvision's, with `width` channels where that has 64."""

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
    """torchvision's, with `last_channel` channels where that has at least 1280."""
    model = MobileNetV2(num_classes=num_classes, **options)
    channels = model.features[-1][0].in_channels
    model.features[-1] = Conv2dNormActivation(channels, last_channel, kernel_size=1, activation_layer=nn.ReLU6)
    model.classifier[1] = nn.Linear(last_channel, num_classes)
    return model
