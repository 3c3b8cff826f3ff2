//! Pictures as SVG or PNG that look the same on every machine: the font of a PNG is part of the program.

mod bars;
mod curves;

use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

pub(crate) use bars::{Bar, Bars};
pub(crate) use curves::{Curve, Curves, Spot};

/// The argument that has a picture drawn.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct DrawingArgs {
    /// Draw into FILE, an SVG or a PNG; repeat it for more
    #[arg(long, value_name = "FILE", num_args = 1.., value_parser = parse_file)]
    plot: Vec<PathBuf>,
}

impl DrawingArgs {
    /// Draws the picture into each of the files, and returns a line for each.
    pub(crate) fn draw(&self, picture: &impl Picture) -> Result<Vec<String>> {
        let lines = self.plot.iter().map(|path| {
            write(path, picture)?;
            Ok(format!("plot   {}", path.display()))
        });
        lines.collect()
    }
}

/// What is drawn on.
pub(crate) type Canvas<B> = DrawingArea<B, Shift>;

/// Something that can be drawn on any kind of canvas.
pub(crate) trait Picture {
    /// Width and height in pixels.
    fn size(&self) -> (u32, u32);

    /// Draws it on an empty canvas of that size.
    fn draw<B: DrawingBackend<ErrorType: 'static>>(&self, canvas: &Canvas<B>) -> Result<()>;
}

/// Colours that people can tell apart, including colour-blind people (Okabe and Ito).
pub(crate) const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(213, 94, 0),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
];

/// The colour of text, axes and marks.
pub(crate) const INK: RGBColor = RGBColor(40, 40, 40);

/// The colour of grid lines.
pub(crate) const GRID: RGBColor = RGBColor(225, 225, 225);

/// The embedded font has this name; in an SVG it is the viewer's own font.
const FONT: &str = "sans-serif";

/// Roboto; see `assets/README.md`.
static ROBOTO: &[u8] = include_bytes!("../../../assets/Roboto-Regular.ttf");

/// A file name that ends in `.svg` or `.png`; for clap.
fn parse_file(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg" | "png") => Ok(path),
        _ => Err("give a file whose name ends in .svg or .png".to_owned()),
    }
}

/// Draws `picture` into the file `path`, as SVG or, if the name ends so, as PNG.
///
/// # Errors
/// If the file cannot be written.
fn write(path: &Path, picture: &impl Picture) -> Result<()> {
    plotters::style::register_font(FONT, FontStyle::Normal, ROBOTO)
        .map_err(|_| anyhow!("the embedded font is damaged"))?;
    let context = || format!("cannot write {}", path.display());
    if path.extension().is_some_and(|extension| extension == "png") {
        return write_png(path, picture).with_context(context);
    }
    let mut text = String::new();
    draw(SVGBackend::with_string(&mut text, picture.size()), picture)?;
    std::fs::write(path, text).with_context(context)
}

/// Text of `size` pixels, anchored at `horizontal` and `vertical`.
pub(crate) fn text(size: u32, horizontal: HPos, vertical: VPos) -> TextStyle<'static> {
    TextStyle::from((FONT, size).into_font()).color(&INK).pos(Pos::new(horizontal, vertical))
}

fn write_png(path: &Path, picture: &impl Picture) -> Result<()> {
    let (width, height) = picture.size();
    let mut pixels = vec![0; 3 * width as usize * height as usize];
    draw(BitMapBackend::with_buffer(&mut pixels, (width, height)), picture)?;
    let mut encoder = png::Encoder::new(BufWriter::new(File::create(path)?), width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&pixels)?;
    Ok(writer.finish()?)
}

fn draw<B: DrawingBackend<ErrorType: 'static>>(backend: B, picture: &impl Picture) -> Result<()> {
    let canvas = backend.into_drawing_area();
    canvas.fill(&WHITE)?;
    picture.draw(&canvas)?;
    Ok(canvas.present()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct One;

    impl Picture for One {
        fn size(&self) -> (u32, u32) {
            (320, 240)
        }

        fn draw<B: DrawingBackend<ErrorType: 'static>>(&self, canvas: &Canvas<B>) -> Result<()> {
            let bar = Bar {
                value: 2.0,
                shown: "2.0".to_owned(),
                label: vec!["one".to_owned()],
                colour: COLOURS[0],
                mark: Some(3.0),
            };
            Bars { title: "bars", bars: &[bar], labels: true }.draw(canvas)
        }
    }

    #[test]
    fn an_svg_has_the_text_and_a_png_the_pixels() {
        let place = tempfile::tempdir().unwrap();
        let (svg, png) = (place.path().join("a.svg"), place.path().join("a.png"));
        write(&svg, &One).unwrap();
        let text = std::fs::read_to_string(svg).unwrap();
        assert!(["bars", "2.0", "one"].iter().all(|word| text.contains(word)), "{text}");

        write(&png, &One).unwrap();
        let reader = std::io::BufReader::new(File::open(png).unwrap());
        let mut reader = png::Decoder::new(reader).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((info.width, info.height), (320, 240));
        let RGBColor(red, green, blue) = COLOURS[0];
        assert!(pixels.chunks(3).filter(|pixel| *pixel == [red, green, blue]).count() > 1000);
    }

    #[test]
    fn other_files_are_refused_and_a_folder_that_is_not_there_is_named() {
        assert!(parse_file("a.svg").is_ok() && parse_file("b/a.png").is_ok());
        assert!(parse_file("a.gif").is_err() && parse_file("svg").is_err());
        for name in ["/nowhere/a.svg", "/nowhere/a.png"] {
            let error = format!("{:#}", write(Path::new(name), &One).unwrap_err());
            assert!(error.contains(name), "{error}");
        }
    }
}
